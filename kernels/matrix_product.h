// Small matrix products whose sums stay in registers. Included once per instruction set (see instruction_sets.h).
// Left matrices are read number by number, by any two strides, so that a transposed one costs nothing; right matrices are read in whole registers.

constexpr int kColumns = kLanes == 16 ? 4 : 2;  // registers of one row of a tile

// c[r][:] = or += the sum over i < depth of a[r * a_row + i * a_step] * b[i * b_step + :], for R rows and V registers.
template <int R, int V>
static inline void product_tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_row, bool add) {
  Floats sum[R][V] = {};
  for (int64_t i = 0; i < depth; ++i) {
    Floats right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float left = a[r * a_row];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] += right[v] * left;
    }
    a += a_step;
    b += b_step;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = c + r * c_row + v * kLanes;
      store(to, add ? load(to) + sum[r][v] : sum[r][v]);
    }
}

// As many whole tiles of R rows as there are; returns the first row that is left.
template <int R, int V>
static inline int64_t product_tiles(int64_t r, int64_t rows, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_row, bool add) {
  for (; r + R <= rows; r += R) product_tile<R, V>(a + r * a_row, a_row, a_step, b, b_step, depth, c + r * c_row, c_row, add);
  return r;
}

template <int V>
static void product_rows(int64_t rows, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_row, bool add) {
  int64_t r = 0;
  if (kLanes == 16 && V <= 2) r = product_tiles<12, V>(r, rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
  r = product_tiles<6, V>(r, rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
  r = product_tiles<4, V>(r, rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
  r = product_tiles<2, V>(r, rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
  product_tiles<1, V>(r, rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
}

// Any number of rows, and `registers` whole registers of columns.
static void product(int64_t rows, int64_t registers, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_row, bool add) {
  for (; registers >= kColumns; registers -= kColumns, b += kColumns * kLanes, c += kColumns * kLanes)
    product_rows<kColumns>(rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
  switch (registers) {
    case 1: return product_rows<1>(rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
#if VECTOR_BYTES == 64
    case 2: return product_rows<2>(rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
    case 3: return product_rows<3>(rows, a, a_row, a_step, b, b_step, depth, c, c_row, add);
#endif
    default: return;
  }
}

static inline int64_t registers_of(int64_t numbers) { return (numbers + kLanes - 1) / kLanes; }

// Rows of `size` numbers turned into columns: to[d * kKeys + t] = from[t * stride + d], zeros for t in [rows, kKeys) as far as the last register that holds a row.
static void turn(const float* from, int64_t stride, int64_t rows, int64_t size, float* to) {
#if VECTOR_BYTES == 64
  for (int64_t t = 0; t < rows; t += 16) {
    const int64_t count = std::min<int64_t>(16, rows - t);
    for (int64_t d = 0; d < size; d += 16) {
      const int64_t wide = std::min<int64_t>(16, size - d);
      const __mmask16 inside = static_cast<__mmask16>((1u << wide) - 1);
      __m512 a[16], b[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_ps(i < count ? inside : 0, from + (i < count ? t + i : t) * stride + d);
#pragma GCC unroll 8
      for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4) {
        a[i] = (__m512)_mm512_unpacklo_pd((__m512d)b[i], (__m512d)b[i + 2]), a[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)b[i], (__m512d)b[i + 2]);
        a[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)b[i + 1], (__m512d)b[i + 3]), a[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)b[i + 1], (__m512d)b[i + 3]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88), b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88), a[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
        a[i + 4] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88), a[i + 12] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        if (i < wide) _mm512_storeu_ps(to + (d + i) * kKeys + t, a[i]);
    }
  }
#else
  transpose(from, stride, rows, size, to);
#endif
}
