// Causal attention on packed sequences, forward and backward: one task's walk over its tiles. Included once per instruction set (see instruction_sets.h).
// Keys are the outer loop, so that each is read, turned and written once; what a tile needs stays in the nearest caches.

// One allocation, cut into pieces that begin at whole cache lines. Small ones are kept by the thread.
class FusionScratch {
 public:
  explicit FusionScratch(int64_t numbers) {
    static thread_local std::vector<float> kept;
    numbers += 16;
    if (numbers > kKept) own_.reset(new float[numbers]);
    else if (static_cast<int64_t>(kept.size()) < numbers) kept.resize(numbers);
    float* begin = own_ ? own_.get() : kept.data();
    next_ = begin + (-(reinterpret_cast<uintptr_t>(begin) / 4) & 15);
  }
  float* take(int64_t numbers) {
    float* piece = next_;
    next_ += rounded(numbers);
    return piece;
  }
  static int64_t rounded(int64_t numbers) { return (numbers + 15) / 16 * 16; }

 private:
  static constexpr int64_t kKept = 1 << 19;
  std::unique_ptr<float[]> own_;
  float* next_;
};

// Rows of neighbouring heads, each head to a place of its own; memory is read in the order in which it lies.
static void gather_rows(const float* from, int64_t from_row, int64_t from_head, int64_t rows, int64_t heads, int64_t size, int64_t width, float factor, float* to, int64_t to_head) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t h = 0; h < heads; ++h) {
      const float* x = from + m * from_row + h * from_head;
      float* y = to + h * to_head + m * width;
      int64_t d = 0;
      for (; d + kLanes <= size; d += kLanes) store(y + d, load(x + d) * factor);
      for (; d < size; ++d) y[d] = x[d] * factor;
      for (; d < width; ++d) y[d] = 0.0f;
    }
}

// The way back, into [row, head, size].
static void write_rows(const float* from, int64_t from_head, int64_t width, int64_t rows, int64_t heads, int64_t size, float factor, float* to, int64_t to_row) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t h = 0; h < heads; ++h) {
      const float* x = from + h * from_head + m * width;
      float* y = to + m * to_row + h * size;
      int64_t d = 0;
      for (; d + kLanes <= size; d += kLanes) store(y + d, load(x + d) * factor);
      for (; d < size; ++d) y[d] = x[d] * factor;
    }
}

static float inner(const float* a, const float* b, int64_t size) {
  Floats product = {};
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) product += load(a + d) * load(b + d);
  float sum = total(product);
  for (; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

static bool ascend(const int64_t* times, int64_t length) {
  for (int64_t i = 1; i < length; ++i)
    if (times[i] < times[i - 1]) return false;
  return true;
}

// A head's weights of distances laid out by key: entry `length - 1 - distance`, then zeros for keys after the query.
static const float* lay_positions(const JaggedFusion& a, int64_t head, int64_t length, float* table) {
  const float* weights = a.position_weights + head * a.positions;
  for (int64_t d = 0; d < length; ++d) table[length - 1 - d] = weights[std::min(d, a.positions - 1)];
  std::fill(table + length, table + length + kKeys, 0.0f);
  return table + length - 1;
}

// What both directions know of one task.
struct FusionShape {
  int64_t start, length, heads, first_head, width, value_width, positions;
  float score_factor, value_factor;
  bool ascending;

  FusionShape(const JaggedFusion& a, const FusionTask& task) {
    start = a.offsets[task.sequence], length = a.offsets[task.sequence + 1] - start;
    heads = (task.group_end - task.group_begin) * a.share, first_head = task.group_begin * a.share;
    width = registers_of(a.size) * kLanes, value_width = registers_of(a.value_size) * kLanes;
    positions = a.position_weights ? length + kKeys : 0;
    score_factor = a.form == 1 ? a.scale : 1.0f;
    value_factor = a.form != 0 ? 1.0f : a.scale != 0.0f ? a.scale : 1.0f / static_cast<float>(length);
    ascending = a.times && ascend(a.times + start, length);
  }
};

template <int Form>
static void attend_forward(const JaggedFusion& a, const FusionTask& task, const TimeBuckets& buckets) {
  const FusionShape at(a, task);
  const int64_t rows = task.row_end - task.row_begin, groups = task.group_end - task.group_begin;
  const auto rounded = FusionScratch::rounded;
  const int64_t per_head = rounded(rows * at.width) + rounded(rows * at.value_width) + 2 * rounded(rows) + rounded(at.positions);
  const int64_t key_tile = rounded(kKeys * at.width), value_tile = rounded(kKeys * at.value_width);
  FusionScratch scratch(at.heads * per_head + groups * (2 * key_tile + value_tile) + kKeys * kKeys);
  static thread_local BucketTile tile;
  float *q = scratch.take(at.heads * rounded(rows * at.width)), *o = scratch.take(at.heads * rounded(rows * at.value_width));
  float *top = scratch.take(at.heads * rounded(rows)), *sum = scratch.take(at.heads * rounded(rows)), *table = scratch.take(at.heads * rounded(at.positions));
  float *k = scratch.take(groups * key_tile), *k_turned = scratch.take(groups * key_tile), *v = scratch.take(groups * value_tile), *s = scratch.take(kKeys * kKeys);
  std::fill(o, o + at.heads * rounded(rows * at.value_width), 0.0f);
  if (Form == 1) std::fill(top, top + at.heads * rounded(rows), -INFINITY), std::fill(sum, sum + at.heads * rounded(rows), 0.0f);
  static thread_local std::vector<FusionBias> bias;
  bias.assign(at.heads, FusionBias{});
  if (Form != 2) {
    const float* from = a.q + (at.start + task.row_begin) * a.q_row + at.first_head * a.q_head;
    gather_rows(from, a.q_row, a.q_head, rows, at.heads, a.size, at.width, at.score_factor, q, rounded(rows * at.width));
  }
  for (int64_t h = 0; h < at.heads; ++h) {
    const int64_t head = at.first_head + h;
    if (a.times) bias[h].tile = &tile, bias[h].time_weights = a.time_weights + head * a.buckets;
    if (a.position_weights) bias[h].position_weights = lay_positions(a, head, at.length, table + h * rounded(at.positions));
  }
  for (int64_t first = 0; first < task.row_end; first += kKeys) {
    const int64_t keys = std::min(kKeys, task.row_end - first);
    const float* k_from = a.k + (at.start + first) * a.k_row + task.group_begin * a.k_head;
    const float* v_from = a.v + (at.start + first) * a.v_row + task.group_begin * a.v_head;
    if (Form != 2) gather_rows(k_from, a.k_row, a.k_head, keys, groups, a.size, at.width, 1.0f, k, key_tile);
    gather_rows(v_from, a.v_row, a.v_head, keys, groups, a.value_size, at.value_width, 1.0f, v, value_tile);
    for (int64_t g = 0; g < groups && Form != 2; ++g) turn(k + g * key_tile, at.width, keys, a.size, k_turned + g * key_tile);
    for (int64_t row = std::max(first, task.row_begin); row < task.row_end; row += kKeys) {
      const FusionBlock b{std::min(kKeys, task.row_end - row), keys, row, first, row == first};
      if (a.times) find_buckets(buckets, a.times + at.start, at.ascending, b, tile);
      for (int64_t h = 0; h < at.heads; ++h) {
        const int64_t g = h / a.share, m = row - task.row_begin;
        float* o_rows = o + h * rounded(rows * at.value_width) + m * at.value_width;
        if (Form != 2) fusion_products(b, q + h * rounded(rows * at.width) + m * at.width, at.width, a.size, k_turned + g * key_tile, s);
        weigh<Form>(b, bias[h], s, top + h * rounded(rows) + m, sum + h * rounded(rows) + m, o_rows, at.value_width);
        add_by_rows(b, s, v + g * value_tile, at.value_width, o_rows);
      }
    }
  }
  float* out = a.out + ((at.start + task.row_begin) * a.heads + at.first_head) * a.value_size;
  float* sums = a.sums + (at.start + task.row_begin) * a.heads + at.first_head;
  if (Form != 1) return write_rows(o, rounded(rows * at.value_width), at.value_width, rows, at.heads, a.value_size, at.value_factor, out, a.heads * a.value_size);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t h = 0; h < at.heads; ++h) {
      const float* o_row = o + h * rounded(rows * at.value_width) + m * at.value_width;
      const float all = sum[h * rounded(rows) + m];
      write_rows(o_row, 0, 0, 1, 1, a.value_size, 1.0f / all, out + (m * a.heads + h) * a.value_size, 0);
      sums[m * a.heads + h] = top[h * rounded(rows) + m] + std::log(all);
    }
}

template <int Form>
static void attend_backward(const JaggedFusion& a, const FusionTask& task, const TimeBuckets& buckets) {
  const FusionShape at(a, task);
  const int64_t n = at.length, groups = task.group_end - task.group_begin, heads = at.heads;
  const auto rounded = FusionScratch::rounded;
  const int64_t wide = rounded(n * at.width), value_wide = rounded(n * at.value_width), thin = rounded(n), placed = rounded(at.positions);
  const int64_t timed = a.grad_time ? a.buckets * kLanes : 0, moved = a.grad_position ? placed : 0;
  const int64_t key_tile = rounded(kKeys * at.width), value_tile = rounded(kKeys * at.value_width);
  FusionScratch scratch(heads * (2 * wide + value_wide + 2 * thin + placed + timed + moved) + groups * (3 * key_tile + 3 * value_tile) + 2 * kKeys * kKeys);
  static thread_local BucketTile tile;
  float *q = scratch.take(heads * wide), *grad_q = scratch.take(heads * wide), *grad_o = scratch.take(heads * value_wide);
  float *sums = scratch.take(heads * thin), *delta = scratch.take(heads * thin), *table = scratch.take(heads * placed);
  float *time_sums = scratch.take(heads * timed), *position_sums = scratch.take(heads * moved);
  float *k_turned = scratch.take(groups * key_tile), *k = scratch.take(groups * key_tile), *grad_k = scratch.take(groups * key_tile);
  float *v_turned = scratch.take(groups * value_tile), *v = scratch.take(groups * value_tile), *grad_v = scratch.take(groups * value_tile);
  float *s = scratch.take(kKeys * kKeys), *g = scratch.take(kKeys * kKeys);
  if (Form != 2) std::fill(grad_q, grad_q + heads * wide, 0.0f);
  std::fill(time_sums, time_sums + heads * (timed + moved), 0.0f);
  static thread_local std::vector<FusionBias> bias;
  bias.assign(heads, FusionBias{});
  if (Form != 2) gather_rows(a.q + at.start * a.q_row + at.first_head * a.q_head, a.q_row, a.q_head, n, heads, a.size, at.width, at.score_factor, q, wide);
  const float* grad_from = a.grad_out + at.start * a.grad_row + at.first_head * a.grad_head;
  gather_rows(grad_from, a.grad_row, a.grad_head, n, heads, a.value_size, at.value_width, at.value_factor, grad_o, value_wide);
  for (int64_t m = 0; m < n && Form == 1; ++m)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t place = (at.start + m) * a.heads + at.first_head + h;
      delta[h * thin + m] = inner(a.out + place * a.value_size, grad_o + h * value_wide + m * at.value_width, a.value_size);
      sums[h * thin + m] = a.sums[place];
    }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = at.first_head + h;
    if (a.times) bias[h].tile = &tile, bias[h].time_weights = a.time_weights + head * a.buckets;
    if (a.position_weights) bias[h].position_weights = lay_positions(a, head, n, table + h * placed);
    if (a.grad_time) bias[h].time_sums = time_sums + h * timed;
    if (a.grad_position) bias[h].position_sums = position_sums + h * moved + n - 1;
  }
  for (int64_t first = 0; first < n; first += kKeys) {
    const int64_t keys = std::min(kKeys, n - first);
    const float* k_from = a.k + (at.start + first) * a.k_row + task.group_begin * a.k_head;
    const float* v_from = a.v + (at.start + first) * a.v_row + task.group_begin * a.v_head;
    if (Form != 2) gather_rows(k_from, a.k_row, a.k_head, keys, groups, a.size, at.width, 1.0f, k, key_tile);
    gather_rows(v_from, a.v_row, a.v_head, keys, groups, a.value_size, at.value_width, 1.0f, v, value_tile);
    for (int64_t i = 0; i < groups; ++i) {
      if (Form != 2) turn(k + i * key_tile, at.width, keys, a.size, k_turned + i * key_tile);
      turn(v + i * value_tile, at.value_width, keys, a.value_size, v_turned + i * value_tile);
    }
    std::fill(grad_k, grad_k + groups * key_tile, 0.0f);
    std::fill(grad_v, grad_v + groups * value_tile, 0.0f);
    for (int64_t row = first; row < n; row += kKeys) {
      const FusionBlock b{std::min(kKeys, n - row), keys, row, first, row == first};
      if (a.times) find_buckets(buckets, a.times + at.start, at.ascending, b, tile);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t i = h / a.share;
        const float *q_rows = q + h * wide + row * at.width, *grad_rows = grad_o + h * value_wide + row * at.value_width;
        if (Form != 2) fusion_products(b, q_rows, at.width, a.size, k_turned + i * key_tile, s);
        fusion_products(b, grad_rows, at.value_width, a.value_size, v_turned + i * value_tile, g);
        differentiate<Form>(b, bias[h], s, g, sums + h * thin + row, delta + h * thin + row);
        add_by_keys(b, s, grad_rows, at.value_width, grad_v + i * value_tile);
        if (Form == 2) continue;
        add_by_keys(b, g, q_rows, at.width, grad_k + i * key_tile);
        add_by_rows(b, g, k + i * key_tile, at.width, grad_q + h * wide + row * at.width);
      }
    }
    const int64_t kv_heads = a.heads / a.share, to = (at.start + first) * kv_heads + task.group_begin;
    if (Form != 2) write_rows(grad_k, key_tile, at.width, keys, groups, a.size, 1.0f, a.grad_k + to * a.size, kv_heads * a.size);
    write_rows(grad_v, value_tile, at.value_width, keys, groups, a.value_size, 1.0f, a.grad_v + to * a.value_size, kv_heads * a.value_size);
  }
  if (Form != 2) write_rows(grad_q, wide, at.width, n, heads, a.size, at.score_factor, a.grad_q + (at.start * a.heads + at.first_head) * a.size, a.heads * a.size);
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = at.first_head + h;
    if (a.grad_time)
      for (int64_t bucket = 0; bucket < a.buckets; ++bucket)
        a.time_parts[(task.sequence * a.heads + head) * a.buckets + bucket] = total(load(time_sums + h * timed + bucket * kLanes));
    if (a.grad_position)
      for (int64_t d = 0; d < n; ++d) a.position_parts[at.start * a.heads + head * n + d] = position_sums[h * moved + n - 1 - d];
  }
}

static void jagged_fusion(const JaggedFusion& a, const FusionTask& task, const TimeBuckets& buckets, bool backward) {
  if (backward) return (a.form == 0 ? attend_backward<0> : a.form == 1 ? attend_backward<1> : attend_backward<2>)(a, task, buckets);
  (a.form == 0 ? attend_forward<0> : a.form == 1 ? attend_forward<1> : attend_forward<2>)(a, task, buckets);
}
