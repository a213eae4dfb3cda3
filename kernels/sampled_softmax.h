// Sums of exponentials over a target's sampled negatives, and their gradients; a negative's vector is read where it lies in the table.
// Nothing of size targets x negatives x features exists, nor any table of logits. Included once per instruction set (see instruction_sets.h).
//
// A source is a target whose negatives are at work. Its negatives count for itself (place 0) and for the targets that share them (places 1 to partners).

static inline float number(const float* x, int64_t i) { return x[i]; }
static inline float number(const int8_t* x, int64_t i) { return static_cast<float>(x[i]); }
static inline float number(const uint16_t* x, int64_t i) { return half_number(x[i]); }

static inline Floats widened(const float* x) { return load(x); }

static inline Floats widened(const int8_t* x) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#elif VECTOR_BYTES == 32
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#else
  return Floats{number(x, 0), number(x, 1), number(x, 2), number(x, 3)};
#endif
}

static inline Floats widened(const uint16_t* x) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif VECTOR_BYTES == 32
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  return Floats{number(x, 0), number(x, 1), number(x, 2), number(x, 3)};
#endif
}

// Products of one vector with four rows: loads of the vector are shared, and four chains of sums keep the units busy.
template <typename Number>
static inline void four_products(const Number* const* rows, const float* vector, int64_t size, float* out) {
  Floats a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = load(vector + i);
    a += widened(rows[0] + i) * x;
    b += widened(rows[1] + i) * x;
    c += widened(rows[2] + i) * x;
    d += widened(rows[3] + i) * x;
  }
  out[0] = total(a), out[1] = total(b), out[2] = total(c), out[3] = total(d);
  for (; i < size; ++i)
    for (int row = 0; row < 4; ++row) out[row] += number(rows[row], i) * vector[i];
}

template <typename Number>
static inline void add_row(float* to, const Number* row, float factor, int64_t size) {
  const Floats many = spread(factor);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(to + i) + widened(row + i) * many);
  for (; i < size; ++i) to[i] += number(row, i) * factor;
}

static inline int64_t negative(const SampledSoftmax& a, int64_t source, int64_t j) {
  const int64_t at = source * a.negatives + j;
  return a.wide ? static_cast<const int64_t*>(a.chosen)[at] : static_cast<const int32_t*>(a.chosen)[at];
}

// Rows lie far apart: what is needed a few negatives later is asked for now.
template <typename Number>
static inline void fetch_ahead(const SampledSoftmax& a, int64_t source, int64_t j, const Number* table) {
  const int64_t row = j < a.negatives ? negative(a, source, j) : -1;
  if (row < 0 || row >= a.rows) return;
  const char* at = reinterpret_cast<const char*>(table + row * a.size);
  for (int64_t line = 0; line < a.size * static_cast<int64_t>(sizeof(Number)); line += 64) __builtin_prefetch(at + line);
}

static inline int64_t taker(const SampledSoftmax& a, int64_t source, int64_t place) { return place ? a.takers[(place - 1) * a.targets + source] : source; }

static inline bool left_out(const SampledSoftmax& a, int64_t target, int64_t row) {
  if (row < 0 || row == a.positives[target]) return true;
  if (!a.known) return false;
  const int64_t key = a.sequences[target] * a.rows + row;
  // Without a branch that depends on what is found: half of those would be guessed wrongly.
  const int64_t* first = a.known_first + a.known_begin[target];
  int64_t count = a.known_begin[a.targets + target] - a.known_begin[target];
  if (count <= 0) return false;
  while (count > 1) {
    const int64_t half = count / 2;
    first = first[half] <= key ? first + half : first;
    count -= half;
  }
  return *first == key;
}

// Logits of a source's negatives as `scorer` sees them; false where a row lies outside the table.
template <typename Number>
static bool score(const SampledSoftmax& a, int64_t source, int64_t scorer, float* logits) {
  const Number* table = static_cast<const Number*>(a.table);
  const float* vector = a.hidden + scorer * a.size;
  int64_t place[4];
  const Number* rows[4];
  float products[4];
  for (int64_t j = 0; j < a.negatives; j += 4) {
    const int64_t count = std::min<int64_t>(4, a.negatives - j);
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t row = i < count ? negative(a, source, j + i) : 0;
      if (row >= a.rows) return false;
      place[i] = row < 0 ? 0 : row;
      rows[i] = table + place[i] * a.size;
      fetch_ahead(a, source, j + 8 + i, table);
    }
    four_products(rows, vector, a.size, products);
    for (int64_t i = 0; i < count; ++i) {
      float value = products[i] * a.factor;
      if (a.scales) value *= a.scales[place[i]];
      if (a.shift) value -= a.shift[source * a.negatives + j + i] + a.log_draws;
      logits[j + i] = value;
    }
  }
  return true;
}

static inline bool score_any(const SampledSoftmax& a, int64_t source, int64_t scorer, float* logits) {
  if (a.kind == 2) return score<int8_t>(a, source, scorer, logits);
  if (a.kind == 1) return score<uint16_t>(a, source, scorer, logits);
  return score<float>(a, source, scorer, logits);
}

// One logarithm of a sum of exponentials for each target that takes this source's negatives.
static bool sampled_sums(const SampledSoftmax& a, int64_t source, float* scratch) {
  float *logits = scratch, *kept = scratch + a.negatives;
  for (int64_t place = 0; place <= a.partners; ++place) {
    const int64_t target = taker(a, source, place);
    if (!place || !a.as_logits)
      if (!score_any(a, source, a.as_logits ? source : target, logits)) return false;
    int64_t count = 0;
    for (int64_t j = 0; j < a.negatives; ++j) {
      const int64_t row = negative(a, source, j);
      kept[count] = logits[j];
      count += !(left_out(a, target, row) || (a.as_logits && place && left_out(a, source, row)));
    }
    float top;
    a.sums[target * (1 + a.partners) + place] = count ? static_cast<float>(log_sum_exp(kept, count, &top)) : -INFINITY;
  }
  return true;
}

// By how much each of a source's logits moves the loss, [places, negatives]; zero for what is left out. Shared logits are all the source's own: one row.
static void sampled_shares(const SampledSoftmax& a, int64_t source, float* shares, float* logits) {
  for (int64_t place = 0; place <= a.partners; ++place) {
    const int64_t target = taker(a, source, place);
    const float weight = a.weights[target] * a.factor, shift = a.totals[target];
    float* row_of_shares = shares + (a.as_logits ? 0 : place * a.negatives);
    if (!place || !a.as_logits) score_any(a, source, a.as_logits ? source : target, logits);
    const bool none = !(shift > -INFINITY);
    for (int64_t begin = 0; begin < a.negatives; begin += kLanes) {
      Floats values = spread(-INFINITY);
      const int64_t count = std::min<int64_t>(kLanes, a.negatives - begin);
      for (int64_t i = 0; i < count; ++i) values[i] = logits[begin + i];
      values = exponential(values - spread(shift)) * spread(weight);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = negative(a, source, begin + i);
        const bool out = none || left_out(a, target, row) || (a.as_logits && place && left_out(a, source, row));
        const float share = out ? 0.0f : values[i];
        row_of_shares[begin + i] = a.as_logits && place ? row_of_shares[begin + i] + share : share;
      }
    }
  }
}

template <typename Number>
static void add_rows(const SampledSoftmax& a, int64_t source, const float* shares, float* to) {
  const Number* table = static_cast<const Number*>(a.table);
  for (int64_t j = 0; j < a.negatives; ++j) {
    fetch_ahead(a, source, j + 6, table);
    if (shares[j] == 0.0f) continue;
    const int64_t row = negative(a, source, j);
    add_row(to, table + row * a.size, a.scales ? shares[j] * a.scales[row] : shares[j], a.size);
  }
}

// What a source's negatives add to the gradient of the hidden state at one place.
static void sampled_hidden(const SampledSoftmax& a, int64_t source, int64_t place, const float* shares) {
  float* to = a.hidden_grad + (a.as_logits ? source : taker(a, source, place)) * a.size;
  const float* own = shares + (a.as_logits ? 0 : place * a.negatives);
  if (a.kind == 2) return add_rows<int8_t>(a, source, own, to);
  if (a.kind == 1) return add_rows<uint16_t>(a, source, own, to);
  return add_rows<float>(a, source, own, to);
}

// What a source adds to the gradients of those rows that one thread has: every row has one, so sums come in one order whatever the number of threads.
static void sampled_table(const SampledSoftmax& a, int64_t source, const float* shares, int64_t thread, int64_t threads) {
  const int64_t places = a.as_logits ? 0 : a.partners;
  for (int64_t j = 0; j < a.negatives; ++j) {
    if (threads == 1) fetch_ahead(a, source, j + 6, a.table_grad);
    const int64_t row = negative(a, source, j);
    if (row < 0 || (threads > 1 && row % threads != thread)) continue;
    for (int64_t place = 0; place <= places; ++place) {
      const float share = shares[place * a.negatives + j];
      if (share != 0.0f) add_row(a.table_grad + row * a.size, a.hidden + taker(a, source, place) * a.size, share, a.size);
    }
  }
}
