// Vectors of floats for one instruction set. Included once per set, inside that set's namespace, so it has no include guard.
// VECTOR_BYTES is the width of a register, TILE_ROWS how many rows of a matrix product stay in registers at two vectors each.

constexpr int kLanes = VECTOR_BYTES / 4;
constexpr int kTileRows = TILE_ROWS;
typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

static inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
static inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
static inline Floats spread(float value) { return value - Floats{}; }
// Not-a-number in `b` is kept out, in `a` it is dropped too: a caller that must see one adds the values up.
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Across the lanes: first quarter registers at once, then four lanes.
static inline float largest(Floats value) {
  const Quad* parts = reinterpret_cast<const Quad*>(&value);
  Quad top = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) top = parts[i] > top ? parts[i] : top;
  return std::max(std::max(top[0], top[1]), std::max(top[2], top[3]));
}

static inline float total(Floats value) {
  const Quad* parts = reinterpret_cast<const Quad*>(&value);
  Quad sum = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) sum += parts[i];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// e^x for x <= 0 with a relative error of about 1e-7; below -87 it stays near 1e-38; not-a-number comes out as it went in.
// Source of the polynomial: 2^f on [-1/2, 1/2] fitted for the smallest greatest relative error, 8e-8.
static inline Floats exponential(Floats x) {
  // 1.5 * 2^23, the adding of which rounds to a whole number, and the 127 that a float's exponent is stored with.
  const Floats lowest = spread(-87.0f), magic = spread(12582912.0f + 127.0f);
  x = x < lowest ? lowest : x;
  const Floats shifted = x * 1.44269504f + magic;
  const Floats f = x * 1.44269504f - (shifted - magic);
  Floats p = f * 1.327647152e-3f + 9.675541331e-3f;
  p = p * f + 5.550713275e-2f;
  p = p * f + 2.402211972e-1f;
  p = p * f + 6.931469671e-1f;
  p = p * f + 1.000000072f;
  return p * (Floats)((Ints)shifted << 23);  // a product and not a sum of bits, so that any not-a-number stays one
}

// Bit i says whether value i is at least the bound; not-a-number is not.
static inline uint32_t at_least(Floats value, float bound) {
#if VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(bound), _CMP_GE_OQ);
#elif VECTOR_BYTES == 32
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, _mm256_set1_ps(bound), _CMP_GE_OQ));
#else
  uint32_t mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) mask |= static_cast<uint32_t>(value[lane] >= bound) << lane;
  return mask;
#endif
}

// Logarithm of the sum of exponentials, and the largest value. Where any value is not a number, or the largest is infinite, so is or is not the result.
static inline double log_sum_exp(const float* values, int64_t count, float* top) {
  const Floats nothing = spread(-INFINITY);
  Floats peak = nothing;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) peak = larger(load(values + i), peak);
  Floats tail = nothing;
  for (int64_t j = i; j < count; ++j) tail[j - i] = values[j];
  const float highest = largest(larger(tail, peak));
  *top = highest;
  const Floats shift = spread(highest);
  Floats a = {}, b = {};
  int64_t k = 0;
  for (; k + 2 * kLanes <= count; k += 2 * kLanes) {
    a += exponential(load(values + k) - shift);
    b += exponential(load(values + k + kLanes) - shift);
  }
  if (k < i) a += exponential(load(values + k) - shift);
  double sum = total(a + b);
  if (i < count) {
    const Floats rest = exponential(tail - shift);
    for (int64_t j = i; j < count; ++j) sum += rest[j - i];
  }
  return static_cast<double>(highest) + std::log(sum);
}
