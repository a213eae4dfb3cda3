// What linear attention does to one chunk of tokens of one head: decays, products between its tokens, triangular systems. Included once per instruction set
// (see instruction_sets.h). `Each` says whether every channel of a key decays by itself; sums of logarithms are kept in double, since a small difference of two large
// ones is asked for. Tables of a chunk's pairs have rows of kKeys numbers.

constexpr int64_t kRun = kKeys;      // tokens of a chunk at most
constexpr int64_t kRunStrip = 12;    // rows that go through a triangle together
constexpr int64_t kReference = 16;   // rows with decays of their own whose factors have one point of reference
constexpr float kFaded = -64.0f;     // a factor of e to this is nothing, and to compute with it is slow
constexpr double kLowestDecay = -1e4;

// e^x, and zero where it is next to nothing; above 0 it is not asked for.
static inline Floats faded(Floats x) { return x < spread(kFaded) ? Floats{} : exponential(x); }

// Decays of a chunk: from its start to each token (the token's own included), from each token to its end, and over all of it.
struct RunDecay {
  double* sums;  // [n], or [n, size]
  float *fade, *rest, *last;
  int64_t size, width;  // of a key; width is size in whole registers
};

template <bool Each>
static void fill_decay(const float* decay, int64_t step, int64_t n, const RunDecay& to) {
  if (!Each) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) to.sums[i] = sum += std::max<double>(decay[i * step], kLowestDecay);
    float difference[kRun] = {};
    for (int64_t i = 0; i < n; ++i) difference[i] = static_cast<float>(to.sums[i]);
    for (int64_t v = 0; v < registers_of(n); ++v) store(to.fade + v * kLanes, faded(load(difference + v * kLanes)));
    for (int64_t i = 0; i < n; ++i) difference[i] = static_cast<float>(sum - to.sums[i]);
    for (int64_t v = 0; v < registers_of(n); ++v) store(to.rest + v * kLanes, faded(load(difference + v * kLanes)));
    to.last[0] = to.fade[n - 1];
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < to.size; ++c) to.sums[i * to.size + c] = (i ? to.sums[(i - 1) * to.size + c] : 0.0) + std::max<double>(decay[i * step + c], kLowestDecay);
  const double* whole = to.sums + (n - 1) * to.size;
  for (int64_t i = 0; i < n; ++i) {
    const double* sums = to.sums + i * to.size;
    float *fade = to.fade + i * to.width, *rest = to.rest + i * to.width;
    for (int64_t c = 0; c < to.size; ++c) fade[c] = static_cast<float>(sums[c]), rest[c] = static_cast<float>(whole[c] - sums[c]);
    for (int64_t c = to.size; c < to.width; ++c) fade[c] = rest[c] = 0.0f;
    for (int64_t c = 0; c < to.width; c += kLanes) store(fade + c, faded(load(fade + c))), store(rest + c, faded(load(rest + c)));
  }
  std::copy(to.fade + (n - 1) * to.width, to.fade + n * to.width, to.last);
}

// to[i][:] = from[i][:] times the factor of token i.
template <bool Each>
static void scale_run(int64_t n, int64_t width, const float* from, const float* factor, float sign, float* to) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < width; c += kLanes) {
      const Floats by = Each ? load(factor + i * width + c) : spread(factor[i]);
      store(to + i * width + c, load(from + i * width + c) * (by * sign));
    }
}

// The state as the chunk's end finds it.
template <bool Each>
static void fade_state(int64_t size, int64_t width, const float* last, float* state) {
  for (int64_t r = 0; r < size; ++r)
    for (int64_t c = 0; c < width; c += kLanes) store(state + r * width + c, load(state + r * width + c) * last[Each ? r : 0]);
}

// c[i][:] += or = the sum over j of triangle[i][j] * b[j][:]; what lies above the diagonal is zero.
static void add_lower(int64_t n, int64_t registers, const float* triangle, const float* b, int64_t width, float* c, bool add) {
  for (int64_t r = 0; r < n; r += kRunStrip) {
    const int64_t rows = std::min(kRunStrip, n - r);
    product(rows, registers, triangle + r * kKeys, kKeys, 1, b, width, r + rows, c + r * width, width, add);
  }
}

// The same with the triangle turned.
static void add_upper(int64_t n, int64_t registers, const float* triangle, const float* b, int64_t width, float* c, bool add) {
  for (int64_t r = 0; r < n; r += kRunStrip) {
    const int64_t rows = std::min(kRunStrip, n - r);
    product(rows, registers, triangle + r * kKeys + r, 1, kKeys, b + r * width, width, n - r, c + r * width, width, add);
  }
}

// Products of rows with turned ones, as far as the diagonal.
static void lower_products(int64_t n, const float* rows, int64_t width, int64_t depth, const float* turned, float* to) {
  for (int64_t r = 0; r < n; r += kRunStrip) {
    const int64_t many = std::min(kRunStrip, n - r);
    product(many, registers_of(r + many), rows + r * width, width, 1, turned, kKeys, depth, to + r * kKeys, kKeys, false);
  }
}

// Nothing from place `seen` of a row on, as far as the strip of the row is read.
static inline void cut_row(int64_t n, int64_t i, int64_t seen, const float* factor, float sign, float* row) {
  const int64_t read = std::min(n, (i / kRunStrip + 1) * kRunStrip);
  for (int64_t v = 0; v < registers_of(read); ++v) store(row + v * kLanes, only_seen(load(row + v * kLanes) * (load(factor + v * kLanes) * sign), v, seen, 0.0f));
}

// Decay between the tokens of each pair.
static void fill_between(int64_t n, const double* sums, float* between) {
  for (int64_t i = 0; i < n; ++i) {
    float difference[kRun] = {};
    for (int64_t j = 0; j < i; ++j) difference[j] = static_cast<float>(sums[i] - sums[j]);
    const int64_t read = std::min(n, (i / kRunStrip + 1) * kRunStrip);
    for (int64_t v = 0; v < registers_of(read); ++v) store(between + i * kKeys + v * kLanes, faded(load(difference + v * kLanes)));
  }
}

// What queries read of each written value, and, negated, what keys know of it; `between` is kept for the way back (not with Each).
struct RunPairs {
  float *reads, *known, *between;
  float *rows, *keys, *turned;  // scratch: two of [kRun, width], and [width, kKeys]
};

template <bool Delta>
static void fill_pairs_alike(int64_t n, const RunDecay& decay, const float* q, const float* k, const RunPairs& to) {
  turn(k, decay.width, n, decay.size, to.turned);
  fill_between(n, decay.sums, to.between);
  lower_products(n, q, decay.width, decay.size, to.turned, to.reads);
  if (Delta) lower_products(n, k, decay.width, decay.size, to.turned, to.known);
  for (int64_t i = 0; i < n; ++i) {
    cut_row(n, i, i + 1, to.between + i * kKeys, 1.0f, to.reads + i * kKeys);
    if (Delta) cut_row(n, i, i, to.between + i * kKeys, -1.0f, to.known + i * kKeys);
  }
}

// e^(sums[i] - sums[j]) of one channel register by register, into `to`; i is not before j.
static inline void fill_difference(const RunDecay& decay, int64_t i, int64_t j, float* to) {
  const double *later = decay.sums + i * decay.size, *earlier = decay.sums + j * decay.size;
  for (int64_t c = 0; c < decay.size; ++c) to[c] = static_cast<float>(later[c] - earlier[c]);
  for (int64_t c = decay.size; c < decay.width; ++c) to[c] = 0.0f;
  for (int64_t c = 0; c < decay.width; c += kLanes) store(to + c, faded(load(to + c)));
}

// A strip's rows times their decay since its first row, and earlier keys times theirs until it: no exponent is positive.
static void scale_strip(int64_t first, int64_t rows, const RunDecay& decay, float* since, float* until) {
  for (int64_t i = 0; i < rows; ++i) fill_difference(decay, first + i, first, since + i * decay.width);
  for (int64_t j = 0; j < first; ++j) fill_difference(decay, first, j, until + j * decay.width);
}

static inline void multiply(int64_t numbers, const float* a, const float* b, float* to) {
  for (int64_t i = 0; i < numbers; i += kLanes) store(to + i, load(a + i) * load(b + i));
}

template <bool Delta>
static void fill_pairs_each(int64_t n, const RunDecay& decay, const float* q, const float* k, float* factors, const RunPairs& to) {
  const int64_t width = decay.width;
  float *since = factors, *until = factors + kReference * width, *apart = until + kRun * width;
  for (int64_t first = 0; first < n; first += kReference) {
    const int64_t rows = std::min(kReference, n - first), read = std::min(n, (first + rows + kRunStrip) / kRunStrip * kRunStrip);
    scale_strip(first, rows, decay, since, until);
    if (first) {
      multiply(first * width, k, until, to.keys);
      turn(to.keys, width, first, decay.size, to.turned);
      multiply(rows * width, q + first * width, since, to.rows);
      product(rows, registers_of(first), to.rows, width, 1, to.turned, kKeys, decay.size, to.reads + first * kKeys, kKeys, false);
      if (Delta) {
        multiply(rows * width, k + first * width, since, to.rows);
        product(rows, registers_of(first), to.rows, width, 1, to.turned, kKeys, decay.size, to.known + first * kKeys, kKeys, false);
      }
    }
    for (int64_t i = first; i < first + rows; ++i) {
      float *reads = to.reads + i * kKeys, *known = to.known + i * kKeys;
      if (Delta)
        for (int64_t j = 0; j < first; ++j) known[j] = -known[j];
      for (int64_t j = first; j <= i; ++j) {
        fill_difference(decay, i, j, apart);
        Floats read = {}, knows = {};
        for (int64_t c = 0; c < width; c += kLanes) {
          const Floats key = load(k + j * width + c) * load(apart + c);
          read += key * load(q + i * width + c);
          if (Delta) knows += key * load(k + i * width + c);
        }
        reads[j] = total(read);
        if (Delta) known[j] = j < i ? -total(knows) : 0.0f;
      }
      std::fill(reads + i + 1, reads + std::max(i + 1, read), 0.0f);
      if (Delta) std::fill(known + i + 1, known + std::max(i + 1, read), 0.0f);
    }
  }
}

// The way back: gradients of both tables into those of queries, of keys as they ask, and of keys as they are asked.
struct RunGradients {
  float *q, *asking, *asked;  // [n, width], added to
};

template <bool Delta>
static void add_pairs_alike(int64_t n, const RunDecay& decay, const float* q, const float* k, const float* between, float* reads, float* known, const RunGradients& to) {
  const int64_t registers = registers_of(decay.size);
  for (int64_t i = 0; i < n; ++i) {
    cut_row(n, i, i + 1, between + i * kKeys, 1.0f, reads + i * kKeys);
    if (Delta) cut_row(n, i, i, between + i * kKeys, -1.0f, known + i * kKeys);
  }
  add_lower(n, registers, reads, k, decay.width, to.q, true);
  add_upper(n, registers, reads, q, decay.width, to.asked, true);
  if (!Delta) return;
  add_lower(n, registers, known, k, decay.width, to.asking, true);
  add_upper(n, registers, known, k, decay.width, to.asked, true);
}

template <bool Delta>
static void add_pairs_each(int64_t n, const RunDecay& decay, const float* q, const float* k, float* factors, float* reads, float* known, const RunPairs& scratch, const RunGradients& to) {
  const int64_t width = decay.width, registers = registers_of(decay.size);
  float *since = factors, *until = factors + kReference * width, *apart = until + kRun * width;
  for (int64_t first = 0; first < n; first += kReference) {
    const int64_t rows = std::min(kReference, n - first);
    if (first) {
      scale_strip(first, rows, decay, since, until);
      multiply(first * width, k, until, scratch.keys);
      for (int64_t part = 0; part < (Delta ? 2 : 1); ++part) {
        const float *from = part ? k : q, *table = (part ? known : reads) + first * kKeys;
        float* sum = part ? to.asking : to.q;
        const float sign = part ? -1.0f : 1.0f;
        product(rows, registers, table, kKeys, 1, scratch.keys, width, first, scratch.rows, width, false);
        for (int64_t i = 0; i < rows * width; i += kLanes) store(sum + first * width + i, load(sum + first * width + i) + load(scratch.rows + i) * load(since + i) * sign);
        multiply(rows * width, from + first * width, since, scratch.rows);
        product(first, registers, table, 1, kKeys, scratch.rows, width, rows, scratch.turned, width, false);
        for (int64_t j = 0; j < first * width; j += kLanes) store(to.asked + j, load(to.asked + j) + load(scratch.turned + j) * load(until + j) * sign);
      }
    }
    for (int64_t i = first; i < first + rows; ++i)
      for (int64_t j = first; j <= i; ++j) {
        fill_difference(decay, i, j, apart);
        const float read = reads[i * kKeys + j], knows = Delta && j < i ? -known[i * kKeys + j] : 0.0f;
        for (int64_t c = 0; c < width; c += kLanes) {
          const Floats by = load(apart + c), key = load(k + j * width + c) * by, query = load(q + i * width + c);
          Floats asked = query * read;
          store(to.q + i * width + c, load(to.q + i * width + c) + key * read);
          if (Delta) {
            store(to.asking + i * width + c, load(to.asking + i * width + c) + key * knows);
            asked += load(k + i * width + c) * knows;
          }
          store(to.asked + j * width + c, load(to.asked + j * width + c) + asked * by);
        }
      }
  }
}
