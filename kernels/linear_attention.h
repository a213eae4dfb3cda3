// Linear attention on packed sequences, forward and backward: one sequence's walk over its chunks for one head. Included once per instruction set
// (see instruction_sets.h). linear_attention.py has the formulas; the backward pass makes the tables of a chunk's pairs again from the states that chunks began with.

// Buffers of one walk.
struct LinearWalk {
  LinearWalk(const LinearAttention& a, bool backward)
      : size(a.size), value_size(a.value_size), width(FusionScratch::rounded(a.size)), value_width(FusionScratch::rounded(a.value_size)),
        scratch(numbers(a, backward)), sums(a.per_channel ? kRun * size : kRun) {
    const int64_t widest = std::max(width, value_width), factors = a.per_channel ? kRun * width : kRun;
    state = scratch.take(size * value_width);
    write = scratch.take(kRun * value_width);
    out = scratch.take(kRun * widest);
    q = scratch.take(kRun * width);
    k = scratch.take(kRun * width);
    decay = {sums.data(), scratch.take(factors), scratch.take(factors), scratch.take(width), size, width};
    pairs.reads = scratch.take(kKeys * kKeys);
    pairs.known = scratch.take(kKeys * kKeys);
    pairs.between = scratch.take(kKeys * kKeys);
    pairs.turned = scratch.take(kKeys * widest);
    if (a.per_channel) {
      pairs.rows = scratch.take(kReference * width);
      pairs.keys = scratch.take(kRun * width);
      factor = scratch.take((kReference + kRun + 1) * width);
    }
    if (!backward) return;
    grad_state = scratch.take(size * value_width);
    grad_write = scratch.take(kRun * value_width);
    scaled = scratch.take(kRun * width);
    gradients = {scratch.take(kRun * width), scratch.take(kRun * width), scratch.take(kRun * width)};
    grad_reads = scratch.take(kKeys * kKeys);
    grad_known = scratch.take(kKeys * kKeys);
  }

  static int64_t numbers(const LinearAttention& a, bool backward) {
    const int64_t width = FusionScratch::rounded(a.size), value_width = FusionScratch::rounded(a.value_size), widest = std::max(width, value_width);
    const int64_t factors = a.per_channel ? kRun * width : kRun, each = a.per_channel ? (2 * kReference + 2 * kRun + 1) * width : 0;
    const int64_t forward = (a.size + kRun) * value_width + (kRun + kKeys) * widest + (2 * kRun + 1) * width + 2 * factors + 3 * kKeys * kKeys + each;
    return forward + (backward ? (a.size + kRun) * value_width + 4 * kRun * width + 2 * kKeys * kKeys : 0);
  }

  int64_t size, value_size, width, value_width;
  FusionScratch scratch;
  std::vector<double> sums;
  RunDecay decay{};
  RunPairs pairs{};
  RunGradients gradients{};
  float *state, *write, *out, *q, *k, *factor = nullptr;
  float *grad_state = nullptr, *grad_write = nullptr, *scaled = nullptr, *grad_reads = nullptr, *grad_known = nullptr;
};

static void read_state(const float* from, int64_t size, int64_t value_size, int64_t width, float* to) {
  if (from) gather_rows(from, value_size, 0, size, 1, value_size, width, 1.0f, to, 0);
  else std::fill(to, to + size * width, 0.0f);
}

// to += from, whose rows have no room behind their numbers.
static void add_rows(const float* from, int64_t size, int64_t numbers, int64_t width, float* to) {
  for (int64_t r = 0; r < size; ++r)
    for (int64_t c = 0; c < numbers; ++c) to[r * width + c] += from[r * numbers + c];
}

// Queries, keys, decays and the tables of pairs of a chunk.
template <bool Delta, bool Each>
static void begin_run(const LinearAttention& a, int64_t head, int64_t first, int64_t n, LinearWalk& w) {
  gather_rows(a.q + first * a.q_row + head / a.share * a.q_head, a.q_row, 0, n, 1, a.size, w.width, 1.0f, w.q, 0);
  gather_rows(a.k + first * a.k_row + head / a.share * a.k_head, a.k_row, 0, n, 1, a.size, w.width, 1.0f, w.k, 0);
  const int64_t each = Each ? a.size : 1;
  fill_decay<Each>(a.decay + (first * a.heads + head) * each, a.heads * each, n, w.decay);
  if (Each) fill_pairs_each<Delta>(n, w.decay, w.q, w.k, w.factor, w.pairs);
  else fill_pairs_alike<Delta>(n, w.decay, w.q, w.k, w.pairs);
}

template <bool Delta, bool Each>
static void linear_forward(const LinearAttention& a, int64_t sequence, int64_t head) {
  LinearWalk w(a, false);
  const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1], whole = a.size * a.value_size, wide = w.value_width;
  const int64_t registers = registers_of(a.value_size);
  read_state(a.state ? a.state + (sequence * a.heads + head) * whole : nullptr, a.size, a.value_size, wide, w.state);
  for (int64_t first = begin, chunk = a.chunks[sequence]; first < end; first += a.run, ++chunk) {
    const int64_t n = std::min(a.run, end - first), place = first * a.heads + head;
    begin_run<Delta, Each>(a, head, first, n, w);
    if (a.starts) write_rows(w.state, 0, wide, a.size, 1, a.value_size, 1.0f, a.starts + (chunk * a.heads + head) * whole, a.value_size);
    gather_rows(a.v + first * a.v_row + head * a.v_head, a.v_row, 0, n, 1, a.value_size, wide, 1.0f, w.write, 0);
    if (Delta) {
      // What the state knows of each value is taken off, then what earlier tokens of the chunk write.
      scale_run<Each>(n, w.width, w.k, w.decay.fade, -1.0f, w.out);
      product(n, registers, w.out, w.width, 1, w.state, wide, a.size, w.write, wide, true);
      for (int64_t r = 0; r < n; r += kRunStrip) {
        const int64_t rows = std::min(kRunStrip, n - r);
        if (r) product(rows, registers, w.pairs.known + r * kKeys, kKeys, 1, w.write, wide, r, w.write + r * wide, wide, true);
        for (int64_t i = r; i < r + rows; ++i) {
          const float share = a.beta[place + i * a.heads];
          float* row = w.write + i * wide;
          for (int64_t c = 0; c < wide; c += kLanes) {
            Floats sum = load(row + c);
            for (int64_t j = r; j < i; ++j) sum += load(w.write + j * wide + c) * w.pairs.known[i * kKeys + j];
            store(row + c, sum);
          }
          if (a.unknown) write_rows(row, 0, wide, 1, 1, a.value_size, 1.0f, a.unknown + (place + i * a.heads) * a.value_size, 0);
          for (int64_t c = 0; c < wide; c += kLanes) store(row + c, load(row + c) * share);
        }
      }
    }
    scale_run<Each>(n, w.width, w.q, w.decay.fade, 1.0f, w.q);
    product(n, registers, w.q, w.width, 1, w.state, wide, a.size, w.out, wide, false);
    add_lower(n, registers, w.pairs.reads, w.write, wide, w.out, true);
    write_rows(w.out, 0, wide, n, 1, a.value_size, 1.0f, a.out + place * a.value_size, a.heads * a.value_size);
    fade_state<Each>(a.size, wide, w.decay.last, w.state);
    scale_run<Each>(n, w.width, w.k, w.decay.rest, 1.0f, w.k);
    product(a.size, registers, w.k, 1, w.width, w.write, wide, n, w.state, wide, true);
  }
  write_rows(w.state, 0, wide, a.size, 1, a.value_size, 1.0f, a.end + (sequence * a.heads + head) * whole, a.value_size);
}

// c[:, channel] = a times the turned state (or its gradient), a slab of channels at a time.
static void times_turned(int64_t n, const float* rows, const float* state, const LinearWalk& w, float* to) {
  for (int64_t first = 0; first < w.size; first += kKeys) {
    const int64_t many = std::min(kKeys, w.size - first);
    turn(state + first * w.value_width, w.value_width, many, w.value_size, w.pairs.turned);
    product(n, registers_of(many), rows, w.value_width, 1, w.pairs.turned, kKeys, w.value_size, to + first, w.width, false);
  }
}

// Gradients of the logarithms of decay: what a token reads and asks fades with its sum, what it writes with its sum's opposite, and all with the whole chunk's.
template <bool Each>
static void write_decay_gradients(const LinearAttention& a, int64_t first, int64_t head, int64_t n, const float* end, const LinearWalk& w) {
  const int64_t each = Each ? a.size : 1;
  std::vector<float> running(each, 0.0f);
  for (int64_t r = 0; r < a.size; ++r) running[Each ? r : 0] += inner(end + r * a.value_size, w.grad_state + r * w.value_width, a.value_size);
  for (int64_t i = n - 1; i >= 0; --i) {
    const int64_t place = ((first + i) * a.heads + head) * each;
    const float *q = w.q + i * w.width, *k = w.k + i * w.width, *grad_q = w.gradients.q + i * w.width;
    const float *asking = w.gradients.asking + i * w.width, *asked = w.gradients.asked + i * w.width;
    if (Each)
      for (int64_t c = 0; c < a.size; ++c) running[c] += q[c] * grad_q[c] + k[c] * (asking[c] - asked[c]);
    else
      running[0] += inner(q, grad_q, a.size) + inner(k, asking, a.size) - inner(k, asked, a.size);
    for (int64_t c = 0; c < each; ++c) a.grad_decay[place + c] = a.decay[place + c] < kLowestDecay ? 0.0f : running[c];
  }
}

template <bool Delta, bool Each>
static void linear_backward(const LinearAttention& a, int64_t sequence, int64_t head) {
  LinearWalk w(a, true);
  const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1], whole = a.size * a.value_size, wide = w.value_width, width = w.width;
  const int64_t registers = registers_of(a.value_size);
  read_state(a.grad_end ? a.grad_end + (sequence * a.heads + head) * whole : nullptr, a.size, a.value_size, wide, w.grad_state);
  const int64_t runs = (end - begin + a.run - 1) / a.run;
  for (int64_t run = runs - 1; run >= 0; --run) {
    const int64_t first = begin + run * a.run, n = std::min(a.run, end - first), place = first * a.heads + head, chunk = a.chunks[sequence] + run;
    begin_run<Delta, Each>(a, head, first, n, w);
    read_state(a.starts + (chunk * a.heads + head) * whole, a.size, a.value_size, wide, w.state);
    if (Delta) {
      gather_rows(a.unknown + place * a.value_size, a.heads * a.value_size, 0, n, 1, a.value_size, wide, 1.0f, w.write, 0);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t c = 0; c < wide; c += kLanes) store(w.write + i * wide + c, load(w.write + i * wide + c) * a.beta[place + i * a.heads]);
    } else {
      gather_rows(a.v + first * a.v_row + head * a.v_head, a.v_row, 0, n, 1, a.value_size, wide, 1.0f, w.write, 0);
    }
    float* grad_out = w.out;
    gather_rows(a.grad_out + place * a.value_size, a.heads * a.value_size, 0, n, 1, a.value_size, wide, 1.0f, grad_out, 0);
    add_upper(n, registers, w.pairs.reads, grad_out, wide, w.grad_write, false);
    scale_run<Each>(n, width, w.k, w.decay.rest, 1.0f, w.scaled);
    product(n, registers, w.scaled, width, 1, w.grad_state, wide, a.size, w.grad_write, wide, true);
    if (a.grad_written)
      for (int64_t i = 0; i < n; ++i) add_rows(a.grad_written + (place + i * a.heads) * a.value_size, 1, a.value_size, wide, w.grad_write + i * wide);
    if (Delta) {
      // The triangular system turned, from the last token back; then every gradient times its share of writing, which is that of the value.
      for (int64_t r = (n - 1) / kRunStrip * kRunStrip; r >= 0; r -= kRunStrip) {
        const int64_t rows = std::min(kRunStrip, n - r), later = r + rows;
        if (later < n) product(rows, registers, w.pairs.known + later * kKeys + r, 1, kKeys, w.grad_write + later * wide, wide, n - later, w.grad_write + r * wide, wide, true);
        for (int64_t j = later - 1; j >= r; --j) {
          float* row = w.grad_write + j * wide;
          for (int64_t c = 0; c < wide; c += kLanes) {
            Floats sum = load(row + c);
            for (int64_t i = j + 1; i < later; ++i) sum += load(w.grad_write + i * wide + c) * w.pairs.known[i * kKeys + j];
            store(row + c, sum);
          }
          const int64_t at = place + j * a.heads;
          a.grad_beta[at] = inner(row, a.unknown + at * a.value_size, a.value_size);
          for (int64_t c = 0; c < wide; c += kLanes) store(row + c, load(row + c) * a.beta[at]);
        }
      }
    }
    write_rows(w.grad_write, 0, wide, n, 1, a.value_size, 1.0f, a.grad_v + place * a.value_size, a.heads * a.value_size);
    turn(w.write, wide, n, a.value_size, w.pairs.turned);
    lower_products(n, grad_out, wide, a.value_size, w.pairs.turned, w.grad_reads);
    if (Delta) lower_products(n, w.grad_write, wide, a.value_size, w.pairs.turned, w.grad_known);
    times_turned(n, grad_out, w.state, w, w.gradients.q);
    scale_run<Each>(n, width, w.gradients.q, w.decay.fade, 1.0f, w.gradients.q);
    times_turned(n, w.write, w.grad_state, w, w.gradients.asked);
    scale_run<Each>(n, width, w.gradients.asked, w.decay.rest, 1.0f, w.gradients.asked);
    if (Delta) {
      times_turned(n, w.grad_write, w.state, w, w.gradients.asking);
      scale_run<Each>(n, width, w.gradients.asking, w.decay.fade, -1.0f, w.gradients.asking);
    } else {
      std::fill(w.gradients.asking, w.gradients.asking + n * width, 0.0f);
    }
    if (Each) add_pairs_each<Delta>(n, w.decay, w.q, w.k, w.factor, w.grad_reads, w.grad_known, w.pairs, w.gradients);
    else add_pairs_alike<Delta>(n, w.decay, w.q, w.k, w.pairs.between, w.grad_reads, w.grad_known, w.gradients);
    const float* after = run + 1 < runs ? a.starts + ((chunk + 1) * a.heads + head) * whole : a.end + (sequence * a.heads + head) * whole;
    write_decay_gradients<Each>(a, first, head, n, after, w);
    write_rows(w.gradients.q, 0, width, n, 1, a.size, 1.0f, a.grad_q + place * a.size, a.heads * a.size);
    for (int64_t i = 0; i < n * width; i += kLanes) store(w.scaled + i, load(w.gradients.asking + i) + load(w.gradients.asked + i));
    write_rows(w.scaled, 0, width, n, 1, a.size, 1.0f, a.grad_k + place * a.size, a.heads * a.size);
    fade_state<Each>(a.size, wide, w.decay.last, w.grad_state);
    scale_run<Each>(n, width, w.q, w.decay.fade, 1.0f, w.q);
    product(a.size, registers, w.q, 1, width, grad_out, wide, n, w.grad_state, wide, true);
    if (Delta) {
      scale_run<Each>(n, width, w.k, w.decay.fade, -1.0f, w.k);
      product(a.size, registers, w.k, 1, width, w.grad_write, wide, n, w.grad_state, wide, true);
    }
    if (a.grad_starts) add_rows(a.grad_starts + (chunk * a.heads + head) * whole, a.size, a.value_size, wide, w.grad_state);
  }
  write_rows(w.grad_state, 0, wide, a.size, 1, a.value_size, 1.0f, a.grad_state + (sequence * a.heads + head) * whole, a.value_size);
}

static void linear_attention(const LinearAttention& a, int64_t sequence, int64_t head) {
  const bool delta = a.beta != nullptr, each = a.per_channel != 0;
  if (a.grad_state) return (delta ? each ? linear_backward<true, true> : linear_backward<true, false> : each ? linear_backward<false, true> : linear_backward<false, false>)(a, sequence, head);
  (delta ? each ? linear_forward<true, true> : linear_forward<true, false> : each ? linear_forward<false, true> : linear_forward<false, false>)(a, sequence, head);
}
