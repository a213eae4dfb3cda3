// Attention of many beams over one prompt and over their own few tokens. Included once per instruction set (see instruction_sets.h).
// Beams and the query heads that share a key head are the rows of one matrix product, so a block of the prompt is read once for all of them.
// Blocks are merged by a running maximum and sum, so the result is that of one softmax.

constexpr int64_t kKeys = 64;  // of one block: keys and values of a head of 64 stay in the first-level cache

template <int Rows>
static void scores_of_tile(const float* q_DM, const float* k_DT, int64_t size, float* s_MT) {
  for (int64_t t = 0; t < kKeys; t += 2 * kLanes) {
    Floats left[Rows] = {}, right[Rows] = {};
    for (int64_t d = 0; d < size; ++d) {
      const Floats k0 = load(k_DT + d * kKeys + t), k1 = load(k_DT + d * kKeys + t + kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < Rows; ++m) {
        const float q = q_DM[d * Rows + m];
        left[m] += k0 * q;
        right[m] += k1 * q;
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m) {
      store(s_MT + m * kKeys + t, left[m]);
      store(s_MT + m * kKeys + t + kLanes, right[m]);
    }
  }
}

template <int Rows>
static void add_values(const float* p_MT, const float* v_TD, int64_t keys, int64_t padded, float* o_MD) {
  for (int64_t d = 0; d < padded; d += 2 * kLanes) {
    Floats left[Rows], right[Rows];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m) {
      left[m] = load(o_MD + m * padded + d);
      right[m] = load(o_MD + m * padded + d + kLanes);
    }
    for (int64_t t = 0; t < keys; ++t) {
      const Floats v0 = load(v_TD + t * padded + d), v1 = load(v_TD + t * padded + d + kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < Rows; ++m) {
        const float p = p_MT[m * kKeys + t];
        left[m] += v0 * p;
        right[m] += v1 * p;
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m) {
      store(o_MD + m * padded + d, left[m]);
      store(o_MD + m * padded + d + kLanes, right[m]);
    }
  }
}

// One tile of rows against one block of keys, of which row m sees the first `visible[m]`, or all.
template <int Rows>
static void attend_tile(const float* q_DM, const float* k_DT, const float* v_TD, int64_t size, int64_t padded, int64_t keys, float* top, float* sum, float* o_MD, const int64_t* visible) {
  alignas(64) float s_MT[Rows * kKeys];
  scores_of_tile<Rows>(q_DM, k_DT, size, s_MT);
  for (int m = 0; m < Rows; ++m) {
    float* s = s_MT + m * kKeys;
    for (int64_t t = visible ? visible[m] : keys; t < kKeys; ++t) s[t] = -INFINITY;
    Floats peak = load(s);
    for (int64_t t = kLanes; t < kKeys; t += kLanes) peak = larger(load(s + t), peak);
    const float highest = largest(peak);
    if (highest > top[m]) {
      const float shrink = std::exp(top[m] - highest);
      top[m] = highest;
      sum[m] *= shrink;
      for (int64_t d = 0; d < padded; d += kLanes) store(o_MD + m * padded + d, load(o_MD + m * padded + d) * shrink);
    }
    const Floats shift = spread(top[m]);
    Floats mass = {};
    for (int64_t t = 0; t < kKeys; t += kLanes) {
      const Floats p = exponential(load(s + t) - shift);
      store(s + t, p);
      mass += p;
    }
    sum[m] += total(mass);
  }
  add_values<Rows>(s_MT, v_TD, keys, padded, o_MD);
}

static void attend_rows(int64_t rows, const float* q_MD, const float* k_DT, const float* v_TD, int64_t size, int64_t padded, int64_t keys, float* top, float* sum, float* o_MD, const int64_t* visible = nullptr) {
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) attend_tile<kTileRows>(q_MD + m * size, k_DT, v_TD, size, padded, keys, top + m, sum + m, o_MD + m * padded, visible ? visible + m : nullptr);
  for (; m + 4 <= rows; m += 4) attend_tile<4>(q_MD + m * size, k_DT, v_TD, size, padded, keys, top + m, sum + m, o_MD + m * padded, visible ? visible + m : nullptr);
  for (; m < rows; ++m) attend_tile<1>(q_MD + m * size, k_DT, v_TD, size, padded, keys, top + m, sum + m, o_MD + m * padded, visible ? visible + m : nullptr);
}

// The beams' own tokens, row by row: there are at most a few.
static bool attend_own(const BeamAttention& a, int64_t request, int64_t group, int64_t beam, const float* q, float* top, float* sum, float* o) {
  const int64_t* ancestors = a.ancestors + (request * a.width + beam) * a.steps;
  for (int64_t s = 0; s < a.steps; ++s) {
    if (ancestors[s] < 0 || ancestors[s] >= a.own_rows) return false;
    const float* k = a.own_k + ancestors[s] * a.own_k_row + group * a.own_k_head;
    const float* v = a.own_v + ancestors[s] * a.own_v_row + group * a.own_v_head;
    float score = 0;
    for (int64_t d = 0; d < a.size; ++d) score += q[d] * k[d];
    if (score > *top) {
      const float shrink = std::exp(*top - score);
      *top = score;
      *sum *= shrink;
      for (int64_t d = 0; d < a.size; ++d) o[d] *= shrink;
    }
    const float p = std::exp(score - *top);
    *sum += p;
    for (int64_t d = 0; d < a.size; ++d) o[d] += p * v[d];
  }
  return true;
}

// A block of keys, feature by feature; what is missing of the block is zero.
static void transpose(const float* k, int64_t stride, int64_t keys, int64_t size, float* k_DT) {
  int64_t t = 0;
  for (; t + 4 <= keys; t += 4) {
    const float* row = k + t * stride;
    int64_t d = 0;
    for (; d + 4 <= size; d += 4) {
      const Quad r0 = *reinterpret_cast<const Quad*>(row + d), r1 = *reinterpret_cast<const Quad*>(row + stride + d);
      const Quad r2 = *reinterpret_cast<const Quad*>(row + 2 * stride + d), r3 = *reinterpret_cast<const Quad*>(row + 3 * stride + d);
      const Quad low01 = {r0[0], r1[0], r0[1], r1[1]}, high01 = {r0[2], r1[2], r0[3], r1[3]};
      const Quad low23 = {r2[0], r3[0], r2[1], r3[1]}, high23 = {r2[2], r3[2], r2[3], r3[3]};
      float* to = k_DT + d * kKeys + t;
      *reinterpret_cast<Quad*>(to) = Quad{low01[0], low01[1], low23[0], low23[1]};
      *reinterpret_cast<Quad*>(to + kKeys) = Quad{low01[2], low01[3], low23[2], low23[3]};
      *reinterpret_cast<Quad*>(to + 2 * kKeys) = Quad{high01[0], high01[1], high23[0], high23[1]};
      *reinterpret_cast<Quad*>(to + 3 * kKeys) = Quad{high01[2], high01[3], high23[2], high23[3]};
    }
    for (; d < size; ++d)
      for (int64_t i = 0; i < 4; ++i) k_DT[d * kKeys + t + i] = row[i * stride + d];
  }
  for (; t < kKeys; ++t)
    for (int64_t d = 0; d < size; ++d) k_DT[d * kKeys + t] = t < keys ? k[t * stride + d] : 0.0f;
}

// A block of values, each padded with zeros to whole vectors.
static void pad(const float* v, int64_t stride, int64_t keys, int64_t size, int64_t padded, float* v_TD) {
  for (int64_t t = 0; t < keys; ++t) {
    std::memcpy(v_TD + t * padded, v + t * stride, size * sizeof(float));
    std::fill(v_TD + t * padded + size, v_TD + (t + 1) * padded, 0.0f);
  }
}

// Rows [begin, end) of one request and one key head; row m is beam m / share with query head group * share + m % share.
static bool beam_attention(const BeamAttention& a, int64_t request, int64_t group, int64_t begin, int64_t end) {
  const int64_t rows = end - begin, size = a.size, padded = (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  static thread_local std::vector<float> scratch;
  const int64_t needed = rows * (2 * size + padded + 2) + kKeys * (size + padded) + 16;
  if (static_cast<int64_t>(scratch.size()) < needed) scratch.resize(needed);
  float* k_DT = scratch.data() + (-(reinterpret_cast<uintptr_t>(scratch.data()) / 4) & 15);
  float* v_TD = k_DT + kKeys * size;
  float* o_MD = v_TD + kKeys * padded;
  float* q_rows = o_MD + rows * padded;
  float* q_tiles = q_rows + rows * size;
  float* top = q_tiles + rows * size;
  float* sum = top + rows;
  std::fill(o_MD, o_MD + rows * padded, 0.0f);
  std::fill(top, top + rows, -INFINITY);
  std::fill(sum, sum + rows, 0.0f);
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t beam = (begin + m) / a.share, head = group * a.share + (begin + m) % a.share;
    const float* q = a.q + request * a.q_request + beam * a.q_beam + head * a.q_head;
    for (int64_t d = 0; d < size; ++d) q_rows[m * size + d] = q[d] * a.scale;
  }
  // Inside a tile the queries stand feature by feature, as the product reads them.
  for (int64_t m = 0; m < rows;) {
    const int64_t tile = rows - m >= kTileRows ? kTileRows : rows - m >= 4 ? 4 : 1;
    for (int64_t d = 0; d < size; ++d)
      for (int64_t i = 0; i < tile; ++i) q_tiles[m * size + d * tile + i] = q_rows[(m + i) * size + d];
    m += tile;
  }
  for (int64_t first = a.offsets[request]; first < a.offsets[request + 1]; first += kKeys) {
    const int64_t keys = std::min(kKeys, a.offsets[request + 1] - first);
    const float* k = a.prompt_k + first * a.prompt_k_row + group * a.prompt_k_head;
    const float* v = a.prompt_v + first * a.prompt_v_row + group * a.prompt_v_head;
    transpose(k, a.prompt_k_row, keys, size, k_DT);
    pad(v, a.prompt_v_row, keys, size, padded, v_TD);
    attend_rows(rows, q_tiles, k_DT, v_TD, size, padded, keys, top, sum, o_MD);
  }
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t beam = (begin + m) / a.share, head = group * a.share + (begin + m) % a.share;
    float* o = o_MD + m * padded;
    if (!attend_own(a, request, group, beam, q_rows + m * size, top + m, sum + m, o)) return false;
    const float scale = sum[m] > 0 ? 1.0f / sum[m] : 0.0f;
    float* out = a.out + ((request * a.width + beam) * a.heads + head) * size;
    for (int64_t d = 0; d < size; ++d) out[d] = o[d] * scale;
  }
  return true;
}
