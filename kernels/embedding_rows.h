// Rows of an embedding table: gathered, summed where one row was asked for several times, and stepped. Included once per instruction set (see instruction_sets.h).

// Past the caches where nobody reads it soon; `to` is aligned to a vector.
static inline void stream(float* to, Floats value) {
#if VECTOR_BYTES == 64
  _mm512_stream_ps(to, (__m512)value);
#elif VECTOR_BYTES == 32
  _mm256_stream_ps(to, (__m256)value);
#else
  store(to, value);
#endif
}

static void gather_rows(const GatherRows& a, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 8;  // rows on their way from memory
  // More than the caches hold would only push out what is needed.
  const bool streams = a.count * a.size > (int64_t{1} << 20) && a.size % kLanes == 0 && reinterpret_cast<uintptr_t>(a.out) % VECTOR_BYTES == 0;
  for (int64_t place = begin; place < end; ++place) {
    if (place + kAhead < end) {
      const float* next = a.weight + a.ids[place + kAhead] * a.size;
      for (int64_t i = 0; i < a.size; i += 16) __builtin_prefetch(next + i);
    }
    const float* from = a.weight + a.ids[place] * a.size;
    float* to = a.out + place * a.size;
    int64_t i = 0;
    if (streams) {
      for (; i < a.size; i += kLanes) stream(to + i, load(from + i));
      continue;
    }
    for (; i + kLanes <= a.size; i += kLanes) store(to + i, load(from + i));
    for (; i < a.size; ++i) to[i] = from[i];
  }
#if defined(__x86_64__)
  if (streams) _mm_sfence();
#endif
}

// The rows of one segment, in their order, so that the sum does not depend on who adds.
static inline void segment_sum(const RowSegments& a, int64_t segment, float* sum) {
  constexpr int64_t kAhead = 8;
  int64_t place = a.starts[segment];
  const int64_t end = a.starts[segment + 1], last = a.starts[a.count];
  for (int64_t next = place; next < end; ++next) {
    if (next + kAhead >= last) break;
    const float* ahead = a.values + a.order[next + kAhead] * a.size;
    for (int64_t i = 0; i < a.size; i += 16) __builtin_prefetch(ahead + i);
  }
  std::memcpy(sum, a.values + a.order[place] * a.size, a.size * sizeof(float));
  for (++place; place < end; ++place) {
    const float* from = a.values + a.order[place] * a.size;
    int64_t i = 0;
    for (; i + kLanes <= a.size; i += kLanes) store(sum + i, load(sum + i) + load(from + i));
    for (; i < a.size; ++i) sum[i] += from[i];
  }
}

static void segment_sums(const RowSegments& a, int64_t begin, int64_t end) {
  for (int64_t segment = begin; segment < end; ++segment) segment_sum(a, segment, a.out + segment * a.size);
}

static inline Floats root(Floats x) {
  Floats result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = std::sqrt(x[lane]);
  return result;
}

// One step of the optimiser for the rows [begin, end) of the touched ones; `sum` holds one row.
static void step_rows(const RowStep& a, int64_t begin, int64_t end, float* sum) {
  const int64_t size = a.segments.size;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = a.ids[row];
    const float* gradient = a.segments.values + row * size;
    if (a.segments.order) {
      segment_sum(a.segments, row, sum);
      gradient = sum;
    }
    float* weight = a.weight + id * size;
    const float mean_square = squares(gradient, size) / static_cast<float>(size);
    if (a.kind == 0) {  // row-wise Adagrad
      const float total = a.row_state[id] += mean_square;
      const float factor = a.rate / (std::sqrt(total) + a.eps);
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) store(weight + i, load(weight + i) - load(gradient + i) * factor);
      for (; i < size; ++i) weight[i] -= gradient[i] * factor;
      continue;
    }
    const float steps = a.steps[id] += 1.0f;
    const float first_factor = a.rate / static_cast<float>(1.0 - std::pow(static_cast<double>(a.beta1), static_cast<double>(steps)));
    const float second_factor = 1.0f / static_cast<float>(1.0 - std::pow(static_cast<double>(a.beta2), static_cast<double>(steps)));
    float* first = a.first + id * size;
    if (a.kind == 1) {  // row-wise Adam: one second moment a row
      const float second = a.row_state[id] += (mean_square - a.row_state[id]) * (1.0f - a.beta2);
      const float factor = first_factor / (std::sqrt(second * second_factor) + a.eps);
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) {
        const Floats moved = load(first + i) + (load(gradient + i) - load(first + i)) * (1.0f - a.beta1);
        store(first + i, moved);
        store(weight + i, load(weight + i) - moved * factor);
      }
      for (; i < size; ++i) first[i] += (gradient[i] - first[i]) * (1.0f - a.beta1), weight[i] -= first[i] * factor;
      continue;
    }
    float* second = a.second + id * size;  // Adam
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Floats g = load(gradient + i);
      const Floats moved = load(first + i) + (g - load(first + i)) * (1.0f - a.beta1);
      const Floats spread_out = load(second + i) + (g * g - load(second + i)) * (1.0f - a.beta2);
      store(first + i, moved);
      store(second + i, spread_out);
      store(weight + i, load(weight + i) - moved * first_factor / (root(spread_out * second_factor) + a.eps));
    }
    for (; i < size; ++i) {
      first[i] += (gradient[i] - first[i]) * (1.0f - a.beta1);
      second[i] += (gradient[i] * gradient[i] - second[i]) * (1.0f - a.beta2);
      weight[i] -= first[i] * first_factor / (std::sqrt(second[i] * second_factor) + a.eps);
    }
  }
}
