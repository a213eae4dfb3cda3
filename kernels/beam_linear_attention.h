// Linear attention of many beams over the state they share and the records of their own few tokens. Included once per instruction set (see instruction_sets.h).
// Beams of one state are the rows of one product with it, for queries and keys alike, so the state is read once for all of them; the ancestors of a beam are
// replayed from registers, queries and keys together. beam_linear_attention.py has the formulas.

constexpr int64_t kBeamBlock = 48;  // beams whose products stay in the second-level cache until their ancestors are added

// Records of a shorter type: a brain float is the upper half of a float.
struct BrainFloat {
  uint16_t bits;
};

static inline float number(const BrainFloat* x, int64_t i) {
  const uint32_t bits = static_cast<uint32_t>(x[i].bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline Floats widened(const BrainFloat* x) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16);
#elif VECTOR_BYTES == 32
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16);
#else
  return Floats{number(x, 0), number(x, 1), number(x, 2), number(x, 3)};
#endif
}

// Rounding to the nearest, of two equally near to the even one; not-a-number stays one.
static inline void round_to(float* to, float value) { *to = value; }

static inline void round_to(BrainFloat* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

static inline void round_to(uint16_t* to, float value) {
#if VECTOR_BYTES >= 32
  *to = static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), 0), 0));
#else
  *to = half_bits(value);
#endif
}

template <typename Record>
static inline void keep_row(Record* to, const float* from, int64_t size) {
  for (int64_t i = 0; i < size; ++i) round_to(to + i, from[i]);
}

// Zero below what a float's exponent reaches, so that a decay of 0 forgets everything.
static inline Floats decay_of(Floats log) { return log < spread(-87.0f) ? Floats{} : exponential(log); }

// Products of a record's key with the query and the new key, both decayed channel by channel where `decay` is given.
template <typename Record>
static inline void two_products(const Record* row, const float* q, const float* k, const float* decay, int64_t size, float* with_q, float* with_k) {
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Floats x = widened(row + i);
    if (decay) x *= decay_of(load(decay + i));
    a += x * load(q + i);
    b += x * load(k + i);
  }
  float left = total(a), right = total(b);
  for (; i < size; ++i) {
    const float x = number(row, i) * (decay ? std::exp(decay[i]) : 1.0f);
    left += x * q[i];
    right += x * k[i];
  }
  *with_q = left, *with_k = right;
}

// V registers of one beam: its products with the state, the ancestors' deltas, the new delta and the output.
template <int V, typename Record>
static inline void replay(const BeamLinear& a, const Record* deltas, const int64_t* rows, int64_t behind, const float* weights, float scale, float beta, float with_self, const float* u_q, const float* u_k, const float* v, float* delta, float* out) {
  Floats q[V], k[V];
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) q[i] = load(u_q + i * kLanes) * scale;
  if (a.beta) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) k[i] = load(u_k + i * kLanes) * scale;
    for (int64_t j = 0; j < behind; ++j) {
      const Record* row = deltas + rows[j] * a.heads * a.value_size;
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) {
        const Floats x = widened(row + i * kLanes);
        q[i] += x * weights[2 * j];
        k[i] += x * weights[2 * j + 1];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) k[i] = (load(v + i * kLanes) - k[i]) * beta;
  } else {
    for (int64_t j = 0; j < behind; ++j) {
      const Record* row = deltas + rows[j] * a.heads * a.value_size;
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) q[i] += widened(row + i * kLanes) * weights[2 * j];
    }
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) k[i] = load(v + i * kLanes);
  }
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
    store(delta + i * kLanes, k[i]);
    store(out + i * kLanes, q[i] + k[i] * with_self);
  }
}

// The last few values, fewer than a register.
template <typename Record>
static inline void replay_tail(const BeamLinear& a, const Record* deltas, const int64_t* rows, int64_t behind, const float* weights, float scale, float beta, float with_self, const float* u_q, const float* u_k, const float* v, float* delta, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float q = u_q[i] * scale, k = 0;
    if (a.beta) k = u_k[i] * scale;
    for (int64_t j = 0; j < behind; ++j) {
      const float x = number(deltas + rows[j] * a.heads * a.value_size, i);
      q += x * weights[2 * j];
      k += x * weights[2 * j + 1];
    }
    delta[i] = a.beta ? (v[i] - k) * beta : v[i];
    out[i] = q + delta[i] * with_self;
  }
}

// One beam's ancestors: where they begin in its row of the index. What is missing stands before them.
static inline const int64_t* ancestors_of(const BeamLinear& a, int64_t beam, int64_t* behind) {
  const int64_t* rows = a.rows + beam * a.steps;
  int64_t first = 0;
  while (rows[first] < 0) ++first;
  *behind = a.steps - 1 - first;
  return rows + first;
}

// Beams [begin, end) of one state and one key head.
template <typename Record>
static void beam_linear_block(const BeamLinear& a, int64_t group, int64_t begin, int64_t end, const float* states, float* scratch) {
  const int64_t n = end - begin, share = a.heads / a.groups, size = a.size, columns = registers_of(a.value_size) * kLanes;
  const int64_t sides = a.beta ? 2 : 1;
  Record* own_k = static_cast<Record*>(a.own_k) + group * size;
  Record* own_delta = static_cast<Record*>(a.own_delta);
  float* u = scratch;                                        // [sides, n, columns]
  float* decayed = u + 2 * kBeamBlock * columns;             // [sides, n, d], only where each channel decays by itself
  float* dots = decayed + (a.per_channel ? 2 * kBeamBlock * size : 0);  // [S, 2]
  float* weights = dots + 2 * a.steps;
  float* sum = weights + 2 * a.steps;                        // [d]
  float* delta = sum + size;                                 // [columns]
  for (int64_t beam = begin; beam < end; ++beam) {
    const int64_t row = a.rows[(beam + 1) * a.steps - 1];
    keep_row(own_k + row * a.groups * size, a.k + beam * a.k_beam + group * a.k_head, size);
    std::memcpy(a.own_decay + (row * a.heads + group * share) * a.decays, a.g + (beam * a.heads + group * share) * a.decays, share * a.decays * sizeof(float));
  }
  for (int64_t h = 0; h < share; ++h) {
    const int64_t head = group * share + h;
    const float* state = states + h * size * columns;
    if (a.per_channel) {
      for (int64_t beam = begin; beam < end; ++beam) {
        int64_t behind;
        const int64_t* rows = ancestors_of(a, beam, &behind);
        std::memcpy(sum, a.g + (beam * a.heads + head) * size, size * sizeof(float));
        for (int64_t j = 0; j < behind; ++j)
          for (int64_t i = 0; i < size; ++i) sum[i] += a.own_decay[(rows[j] * a.heads + head) * size + i];
        const float *q = a.q + beam * a.q_beam + group * a.q_head, *k = a.k + beam * a.k_beam + group * a.k_head;
        float *to_q = decayed + (beam - begin) * size, *to_k = decayed + (n + beam - begin) * size;
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
          const Floats decay = decay_of(load(sum + i));
          store(to_q + i, load(q + i) * decay);
          if (a.beta) store(to_k + i, load(k + i) * decay);
        }
        for (; i < size; ++i) {
          const float decay = std::exp(sum[i]);
          to_q[i] = q[i] * decay;
          if (a.beta) to_k[i] = k[i] * decay;
        }
      }
      product(sides * n, columns / kLanes, decayed, size, 1, state, columns, size, u, columns, false);
    } else {
      product(n, columns / kLanes, a.q + begin * a.q_beam + group * a.q_head, a.q_beam, 1, state, columns, size, u, columns, false);
      if (a.beta) product(n, columns / kLanes, a.k + begin * a.k_beam + group * a.k_head, a.k_beam, 1, state, columns, size, u + n * columns, columns, false);
    }
    for (int64_t beam = begin; beam < end; ++beam) {
      int64_t behind;
      const int64_t* rows = ancestors_of(a, beam, &behind);
      const float *q = a.q + beam * a.q_beam + group * a.q_head, *k = a.k + beam * a.k_beam + group * a.k_head;
      float with_self = 0, none, scale = 1;
      two_products(q, k, k, nullptr, size, &with_self, &none);
      if (a.per_channel) {
        std::memcpy(sum, a.g + (beam * a.heads + head) * size, size * sizeof(float));
        for (int64_t j = behind - 1; j >= 0; --j) {
          two_products(own_k + rows[j] * a.groups * size, q, k, sum, size, weights + 2 * j, weights + 2 * j + 1);
          const float* g = a.own_decay + (rows[j] * a.heads + head) * size;
          for (int64_t i = 0; i < size; ++i) sum[i] += g[i];
        }
      } else {
        float log = a.g[beam * a.heads + head];
        for (int64_t j = behind - 1; j >= 0; --j) {
          two_products(own_k + rows[j] * a.groups * size, q, k, nullptr, size, dots + 2 * j, dots + 2 * j + 1);
          const float decay = std::exp(log);
          weights[2 * j] = dots[2 * j] * decay;
          weights[2 * j + 1] = dots[2 * j + 1] * decay;
          log += a.own_decay[rows[j] * a.heads + head];
        }
        scale = std::exp(log);
      }
      const int64_t own = rows[behind] * a.heads + head;
      const float beta = a.beta ? a.beta[beam * a.heads + head] : 1.0f;
      const float *u_q = u + (beam - begin) * columns, *u_k = u + (n + beam - begin) * columns, *v = a.v + beam * a.v_beam + head * a.v_head;
      const Record* deltas = own_delta + head * a.value_size;
      float* out = a.out + (beam * a.heads + head) * a.value_size;
      int64_t i = 0;
      for (; i + 4 * kLanes <= a.value_size; i += 4 * kLanes) replay<4>(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i);
      for (; i + kLanes <= a.value_size; i += kLanes) replay<1>(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i);
      replay_tail(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i, a.value_size - i);
      keep_row(own_delta + own * a.value_size, delta, a.value_size);
    }
  }
}

// Beams [begin, end) of one key head, run by run of equal states.
static void beam_linear(const BeamLinear& a, int64_t group, int64_t begin, int64_t end) {
  const int64_t share = a.heads / a.groups, columns = registers_of(a.value_size) * kLanes, whole = share * a.size * columns;
  static thread_local std::vector<float> kept;
  const int64_t needed = 2 * kBeamBlock * (columns + (a.per_channel ? a.size : 0)) + 4 * a.steps + a.size + columns + (columns == a.value_size ? 0 : whole) + 16;
  if (static_cast<int64_t>(kept.size()) < needed) kept.resize(needed);
  float* scratch = kept.data() + (-(reinterpret_cast<uintptr_t>(kept.data()) / 4) & 15);
  for (int64_t first = begin, last; first < end; first = last) {
    for (last = first + 1; last < end && a.bases[last] == a.bases[first];) ++last;
    const float* states = a.states + (a.bases[first] * a.heads + group * share) * a.size * a.value_size;
    if (columns != a.value_size) {
      float* padded = scratch + needed - 16 - whole;
      for (int64_t row = 0; row < share * a.size; ++row) {
        std::memcpy(padded + row * columns, states + row * a.value_size, a.value_size * sizeof(float));
        std::fill(padded + row * columns + a.value_size, padded + (row + 1) * columns, 0.0f);
      }
      states = padded;
    }
    for (int64_t block = first; block < last; block += kBeamBlock) {
      const int64_t stop = std::min(block + kBeamBlock, last);
      if (a.kind == 0) beam_linear_block<float>(a, group, block, stop, states, scratch);
      if (a.kind == 1) beam_linear_block<BrainFloat>(a, group, block, stop, states, scratch);
      if (a.kind == 2) beam_linear_block<uint16_t>(a, group, block, stop, states, scratch);
    }
  }
}
