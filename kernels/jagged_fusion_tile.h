// What jagged fused attention does to one tile: 64 queries of one head against 64 keys. Included once per instruction set (see instruction_sets.h).
// On the diagonal no product goes further than the registers that a strip of queries sees.

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
