// Causal attention on packed sequences, forward and backward, with the bias of times and positions made inside each tile.
// Included once per instruction set (see native.cpp). A tile is 64 queries of one head against 64 keys; what it needs stays in the nearest caches.
// Past the diagonal no tile is visited, and on it no further than the registers that a strip of queries sees.

constexpr int64_t kStrip = 6;  // queries, or keys, that share their bounds on the diagonal: rows of a matrix product's tile
constexpr int64_t kRegisters = kKeys / kLanes;

struct FusionBlock {
  int64_t rows, keys, first_row, first_key;
  bool diagonal;
  // Keys that the strip of this row reads, and that the row itself may see.
  int64_t reads(int64_t row) const { return diagonal ? std::min(keys, (row / kStrip + 1) * kStrip) : keys; }
  int64_t sees(int64_t row) const { return diagonal ? row + 1 : keys; }
};

// Buckets of a tile's pairs: one number for a register of pairs that all have the same, or -1 and a number for each pair.
struct BucketTile {
  int32_t alike[kKeys * kRegisters];
  int32_t each[kKeys * kKeys];
};

static void find_buckets(const TimeBuckets& buckets, const int64_t* times, bool ascending, const FusionBlock& b, BucketTile& tile) {
  for (int64_t m = 0; m < b.rows; ++m) {
    const int64_t time = times[b.first_row + m], *keys = times + b.first_key, last = b.sees(m) - 1;
    for (int64_t v = 0; v < registers_of(last + 1); ++v) {
      const int64_t from = v * kLanes, to = std::min<int64_t>(from + kLanes - 1, last);
      // Between two keys of ascending times no difference lies outside theirs.
      const int32_t first = ascending ? buckets.of(time - keys[from]) : 0;
      const bool alike = ascending && first == buckets.of(time - keys[to]);
      tile.alike[m * kRegisters + v] = alike ? first : -1;
      if (alike) continue;
      int32_t* each = tile.each + m * kKeys + from;
      for (int64_t i = 0; i < kLanes; ++i) each[i] = from + i <= last ? buckets.of(time - keys[from + i]) : 0;
    }
  }
}

static inline Floats picked(const float* table, const int32_t* places) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_i32gather_ps(_mm512_loadu_si512(places), table, 4);
#elif VECTOR_BYTES == 32
  return (Floats)_mm256_i32gather_ps(table, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places)), 4);
#else
  Floats found;
  for (int i = 0; i < kLanes; ++i) found[i] = table[places[i]];
  return found;
#endif
}

// The bias of one head's tile, and the sums of its gradient.
struct FusionBias {
  const BucketTile* tile = nullptr;
  const float* time_weights = nullptr;
  const float* position_weights = nullptr;  // entry -(i - j) is the weight of that distance; zeros follow for keys after the query
  float* time_sums = nullptr;               // [buckets, kLanes]
  float* position_sums = nullptr;           // as the weights lie

  Floats at(const FusionBlock& b, int64_t m, int64_t v) const {
    Floats bias = {};
    if (tile) {
      const int32_t alike = tile->alike[m * kRegisters + v];
      bias = alike >= 0 ? spread(time_weights[alike]) : picked(time_weights, tile->each + m * kKeys + v * kLanes);
    }
    if (position_weights) bias += load(position_weights + b.first_key + v * kLanes - (b.first_row + m));
    return bias;
  }

  // Sums stay apart by lane, so pairs of one register never meet in a sum.
  void add(const FusionBlock& b, int64_t m, int64_t v, Floats gradient) const {
    if (time_sums) {
      const int32_t alike = tile->alike[m * kRegisters + v];
      if (alike >= 0) {
        float* sum = time_sums + alike * kLanes;
        store(sum, load(sum) + gradient);
      } else {
        const int32_t* each = tile->each + m * kKeys + v * kLanes;
        for (int i = 0; i < kLanes; ++i) time_sums[each[i] * kLanes + i] += gradient[i];
      }
    }
    if (position_sums) {
      float* sum = position_sums + b.first_key + v * kLanes - (b.first_row + m);
      store(sum, load(sum) + gradient);
    }
  }
};

static inline Ints counted(int64_t first) {
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<int32_t>(first) + i;
  return lanes;
}

// Numbers of the first `seen` places, and `otherwise` in the rest.
static inline Floats only_seen(Floats x, int64_t v, int64_t seen, float otherwise) {
  if ((v + 1) * kLanes <= seen) return x;
  const Ints bound = counted(0) * 0 + static_cast<int32_t>(seen);
  return counted(v * kLanes) < bound ? x : spread(otherwise);
}

// 1 / (1 + e^-x).
static inline Floats sigmoid(Floats x) {
  const Floats highest = spread(87.0f), one = spread(1.0f);
  const Floats turned = -x;
  const Floats whole = one + exponential(turned > highest ? highest : turned);
#if VECTOR_BYTES == 64
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)whole);
  return near * (spread(2.0f) - whole * near);
#else
  return one / whole;
#endif
}

// s[m][:] = the products of the tile's queries and keys, as far as each strip reads.
static void fusion_products(const FusionBlock& b, const float* rows, int64_t row, int64_t size, const float* turned, float* s) {
  if (!b.diagonal) return product(b.rows, registers_of(b.keys), rows, row, 1, turned, kKeys, size, s, kKeys, false);
  for (int64_t m = 0; m < b.rows; m += kStrip)
    product(std::min(kStrip, b.rows - m), registers_of(b.reads(m)), rows + m * row, row, 1, turned, kKeys, size, s + m * kKeys, kKeys, false);
}

// out[m][:] += the sum over keys of s[m][key] * keys[key][:].
static void add_by_rows(const FusionBlock& b, const float* s, const float* keys, int64_t width, float* out) {
  if (!b.diagonal) return product(b.rows, width / kLanes, s, kKeys, 1, keys, width, b.keys, out, width, true);
  for (int64_t m = 0; m < b.rows; m += kStrip)
    product(std::min(kStrip, b.rows - m), width / kLanes, s + m * kKeys, kKeys, 1, keys, width, b.reads(m), out + m * width, width, true);
}

// out[key][:] += the sum over rows of s[m][key] * rows[m][:].
static void add_by_keys(const FusionBlock& b, const float* s, const float* rows, int64_t width, float* out) {
  if (!b.diagonal) return product(b.keys, width / kLanes, s, 1, kKeys, rows, width, b.rows, out, width, true);
  for (int64_t t = 0; t < b.keys; t += kStrip)
    product(std::min(kStrip, b.keys - t), width / kLanes, s + t * kKeys + t, 1, kKeys, rows + t * width, width, b.rows - t, out + t * width, width, true);
}

// Scores become weights of the values, in place. With a softmax the running maximum, sum and result follow.
template <int Form>
static void weigh(const FusionBlock& b, const FusionBias& bias, float* s, float* top, float* sum, float* o, int64_t width) {
  for (int64_t m = 0; m < b.rows; ++m) {
    const int64_t seen = b.sees(m), registers = registers_of(seen);
    float* row = s + m * kKeys;
    for (int64_t v = registers; v < registers_of(b.reads(m)); ++v) store(row + v * kLanes, Floats{});
    if (Form != 1) {
      for (int64_t v = 0; v < registers; ++v) {
        const Floats x = (Form == 2 ? Floats{} : load(row + v * kLanes)) + bias.at(b, m, v);
        store(row + v * kLanes, only_seen(Form == 2 ? x : x * sigmoid(x), v, seen, 0.0f));
      }
      continue;
    }
    Floats peak = spread(-INFINITY);
    for (int64_t v = 0; v < registers; ++v) {
      const Floats x = only_seen(load(row + v * kLanes) + bias.at(b, m, v), v, seen, -INFINITY);
      store(row + v * kLanes, x);
      peak = larger(x, peak);
    }
    const float higher = std::max(largest(peak), top[m]);
    const Floats shift = spread(higher);
    Floats added = {};
    for (int64_t v = 0; v < registers; ++v) {
      const Floats p = only_seen(exponential(load(row + v * kLanes) - shift), v, seen, 0.0f);
      store(row + v * kLanes, p);
      added += p;
    }
    if (higher != top[m]) {
      if (top[m] != -INFINITY) {  // else the result is still empty
        const float shrink = std::exp(top[m] - higher);
        for (int64_t d = 0; d < width; d += kLanes) store(o + m * width + d, load(o + m * width + d) * shrink);
        sum[m] *= shrink;
      }
      top[m] = higher;
    }
    sum[m] += total(added);
  }
}

// s: scores become weights. g: gradients of weights become gradients of scores, which are those of the bias too.
template <int Form>
static void differentiate(const FusionBlock& b, const FusionBias& bias, float* s, float* g, const float* sums, const float* delta) {
  for (int64_t m = 0; m < b.rows; ++m) {
    const int64_t seen = b.sees(m), registers = registers_of(seen);
    for (int64_t v = registers; v < registers_of(b.reads(m)); ++v) store(s + m * kKeys + v * kLanes, Floats{}), store(g + m * kKeys + v * kLanes, Floats{});
    const Floats shift = spread(Form == 1 ? sums[m] : 0.0f), mean = spread(Form == 1 ? delta[m] : 0.0f), one = spread(1.0f);
    for (int64_t v = 0; v < registers; ++v) {
      float *at = s + m * kKeys + v * kLanes, *grad_at = g + m * kKeys + v * kLanes;
      const Floats x = (Form == 2 ? Floats{} : load(at)) + bias.at(b, m, v), given = load(grad_at);
      Floats p = x, gradient = given;
      if (Form == 0) {
        const Floats gate = sigmoid(x);
        p = x * gate;
        gradient = given * (gate + p * (one - gate));
      } else if (Form == 1) {
        p = exponential(x - shift);
        gradient = p * (given - mean);
      }
      p = only_seen(p, v, seen, 0.0f), gradient = only_seen(gradient, v, seen, 0.0f);
      store(at, p), store(grad_at, gradient);
      bias.add(b, m, v, gradient);
    }
  }
}

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
