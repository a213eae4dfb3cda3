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

// What is larger than a half float can be becomes its largest: one infinite record would make all that follow it infinite or nothing.
static inline void round_to(uint16_t* to, float value) {
  value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
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

// Four sums across the lanes at once.
static inline void four_totals(Floats a, Floats b, Floats c, Floats d, float* out) {
  Quad sums[4];
  const Floats* all[4] = {&a, &b, &c, &d};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Quad* parts = reinterpret_cast<const Quad*>(all[i]);
    sums[i] = parts[0];
    for (int part = 1; part < kLanes / 4; ++part) sums[i] += parts[part];
  }
  const Quad low01 = {sums[0][0], sums[1][0], sums[0][1], sums[1][1]}, high01 = {sums[0][2], sums[1][2], sums[0][3], sums[1][3]};
  const Quad low23 = {sums[2][0], sums[3][0], sums[2][1], sums[3][1]}, high23 = {sums[2][2], sums[3][2], sums[2][3], sums[3][3]};
  const Quad first = low01 + high01, second = low23 + high23;
  out[0] = first[0] + first[2], out[1] = first[1] + first[3], out[2] = second[0] + second[2], out[3] = second[1] + second[3];
}

// Products of the keys of two records with the query and the new key: [2, 2].
template <typename Record, typename Other>
static inline void four_dots(const Record* one, const Other* other, const float* q, const float* k, int64_t size, float* out) {
  Floats a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = widened(one + i), y = widened(other + i), left = load(q + i), right = load(k + i);
    a += x * left;
    b += x * right;
    c += y * left;
    d += y * right;
  }
  four_totals(a, b, c, d, out);
  for (; i < size; ++i) {
    out[0] += number(one, i) * q[i];
    out[1] += number(one, i) * k[i];
    out[2] += number(other, i) * q[i];
    out[3] += number(other, i) * k[i];
  }
}

// Products of a record's key with the query and the new key, decayed channel by channel.
template <typename Record>
static inline void decayed_dots(const Record* row, const float* q, const float* k, const float* decay, int64_t size, float* out) {
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = widened(row + i) * decay_of(load(decay + i));
    a += x * load(q + i);
    b += x * load(k + i);
  }
  out[0] = total(a), out[1] = total(b);
  for (; i < size; ++i) {
    const float x = number(row, i) * std::exp(decay[i]);
    out[0] += x * q[i];
    out[1] += x * k[i];
  }
}

// Brings what a beam to come will read nearer.
template <typename Record>
static inline void fetch(const Record* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(Record))) __builtin_prefetch(row + i);
}

// V registers of one beam: its products with the state, the ancestors' deltas, the new delta and the output.
template <int V, typename Record>
static inline void replay(const BeamLinear& a, const Record* deltas, const int64_t* rows, int64_t behind, const float* weights, float scale, float beta, float with_self, const float* u_q, const float* u_k, const float* v, float* delta, float* out) {
  Floats q[V], k[V];
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) q[i] = load(u_q + i * kLanes) * scale;
  if (a.beta) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) k[i] = load(u_k + i * kLanes) * scale;
    for (int64_t j = 0; j < behind; ++j) {
      const Record* row = deltas + rows[j] * a.heads * a.value_size;
#pragma GCC unroll 8
      for (int i = 0; i < V; ++i) {
        const Floats x = widened(row + i * kLanes);
        q[i] += x * weights[2 * j];
        k[i] += x * weights[2 * j + 1];
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) k[i] = (load(v + i * kLanes) - k[i]) * beta;
  } else {
    for (int64_t j = 0; j < behind; ++j) {
      const Record* row = deltas + rows[j] * a.heads * a.value_size;
#pragma GCC unroll 8
      for (int i = 0; i < V; ++i) q[i] += widened(row + i * kLanes) * weights[2 * j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) k[i] = load(v + i * kLanes);
  }
#pragma GCC unroll 8
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
  while (first < a.steps - 1 && rows[first] < 0) ++first;
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
  float* u = scratch;                                                   // [sides, n, columns]
  float* decayed = u + 2 * kBeamBlock * columns;                        // [sides, n, d], only where each channel decays by itself
  float* dots = decayed + (a.per_channel ? 2 * kBeamBlock * size : 0);  // [n, S, 2], the last of a beam its new key's own
  float* weights = dots + 2 * kBeamBlock * a.steps + 2;                 // [S, 2]
  float* decays = weights + 2 * a.steps;                                // [S] and a register
  float* sum = decays + a.steps + kLanes;                               // [d]
  float* delta = sum + size;                                            // [columns]
  for (int64_t beam = begin; beam < end; ++beam) {
    const int64_t row = a.rows[(beam + 1) * a.steps - 1];
    if (row < 0) continue;  // nothing comes after it that would replay it
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
      float* dot = dots + (beam - begin) * 2 * a.steps;
      float scale = 1;
      if (beam + 2 < end && a.steps > 1) {
        const int64_t* coming = a.rows + (beam + 2) * a.steps;
        for (int64_t j = 0; j < a.steps - 1; ++j)
          if (coming[j] >= 0) {
            fetch(own_k + coming[j] * a.groups * size, size);
            fetch(own_delta + (coming[j] * a.heads + head) * a.value_size, a.value_size);
          }
      }
      if (h == 0) {
        int64_t j = a.per_channel ? behind : 0;
        for (; j + 2 <= behind; j += 2) four_dots(own_k + rows[j] * a.groups * size, own_k + rows[j + 1] * a.groups * size, q, k, size, dot + 2 * j);
        float last[4];
        if (j < behind) {
          four_dots(own_k + rows[j] * a.groups * size, k, q, k, size, last);
          dot[2 * j] = last[0], dot[2 * j + 1] = last[1];
        } else {
          four_dots(k, k, q, k, size, last);
        }
        dot[2 * behind] = last[2];
      }
      const float with_self = dot[2 * behind];
      if (a.per_channel) {
        std::memcpy(sum, a.g + (beam * a.heads + head) * size, size * sizeof(float));
        for (int64_t j = behind - 1; j >= 0; --j) {
          decayed_dots(own_k + rows[j] * a.groups * size, q, k, sum, size, weights + 2 * j);
          const float* g = a.own_decay + (rows[j] * a.heads + head) * size;
          for (int64_t i = 0; i < size; ++i) sum[i] += g[i];
        }
      } else {
        float log = a.g[beam * a.heads + head];
        for (int64_t j = behind - 1; j >= 0; --j) {
          decays[j + 1] = log;
          log += a.own_decay[rows[j] * a.heads + head];
        }
        decays[0] = log;
        for (int64_t j = 0; j <= behind; j += kLanes) store(decays + j, decay_of(load(decays + j)));
        scale = decays[0];
        for (int64_t j = 0; j < behind; ++j) {
          weights[2 * j] = dot[2 * j] * decays[j + 1];
          weights[2 * j + 1] = dot[2 * j + 1] * decays[j + 1];
        }
      }
      const int64_t own = rows[behind] < 0 ? -1 : rows[behind] * a.heads + head;
      const float beta = a.beta ? a.beta[beam * a.heads + head] : 1.0f;
      const float *u_q = u + (beam - begin) * columns, *u_k = u + (n + beam - begin) * columns, *v = a.v + beam * a.v_beam + head * a.v_head;
      const Record* deltas = own_delta + head * a.value_size;
      float* out = a.out + (beam * a.heads + head) * a.value_size;
      int64_t i = 0;
      if (kLanes == 16)
        for (; i + 8 * kLanes <= a.value_size; i += 8 * kLanes) replay<8>(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i);
      for (; i + 4 * kLanes <= a.value_size; i += 4 * kLanes) replay<4>(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i);
      for (; i + kLanes <= a.value_size; i += kLanes) replay<1>(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i);
      replay_tail(a, deltas + i, rows, behind, weights, scale, beta, with_self, u_q + i, u_k + i, v + i, delta + i, out + i, a.value_size - i);
      if (own >= 0) keep_row(own_delta + own * a.value_size, delta, a.value_size);
    }
  }
}

// Beams [begin, end) of one key head, run by run of equal states.
static void beam_linear(const BeamLinear& a, int64_t group, int64_t begin, int64_t end) {
  const int64_t share = a.heads / a.groups, columns = registers_of(a.value_size) * kLanes, whole = share * a.size * columns;
  static thread_local std::vector<float> kept;
  const int64_t needed = 2 * kBeamBlock * (columns + (a.per_channel ? a.size : 0)) + (2 * kBeamBlock + 3) * a.steps + 2 + kLanes + a.size + columns + (columns == a.value_size ? 0 : whole) + 16;
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
