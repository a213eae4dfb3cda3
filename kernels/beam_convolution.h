// The short convolution for beams, whose last inputs lie in the rows that an index names, and SiLU. Included once per instruction set (see instruction_sets.h).

template <typename Record>
static inline Floats widened_some(const Record* from, int64_t many) {
  if (many >= kLanes) return widened(from);
  Floats value = {};
  for (int64_t i = 0; i < many; ++i) value[i] = number(from, i);
  return value;
}

// What is kept for beams to come, of all beams before any is convolved: nodes of a tree may follow one another.
template <typename Record>
static void keep_inputs(const BeamConvolution& a, int64_t begin, int64_t end) {
  for (int64_t beam = begin; beam < end; ++beam) {
    const int64_t row = a.rows[(beam + 1) * a.steps - 1];
    if (row >= 0) keep_row(static_cast<Record*>(a.own) + row * a.channels, a.x + beam * a.x_row, a.channels);
  }
}

template <typename Record>
static void convolve_beams(const BeamConvolution& a, int64_t begin, int64_t end) {
  for (int64_t beam = begin; beam < end; ++beam) {
    const int64_t* rows = a.rows + beam * a.steps;
    int64_t depth = a.steps - 1;
    while (depth > 0 && rows[a.steps - 1 - depth] < 0) --depth;
    const float* before = a.before + a.requests_of[beam] * (a.taps - 1) * a.channels;
    for (int64_t c = 0; c < a.channels; c += kLanes) {
      const int64_t many = a.channels - c;
      Floats sum = load_some(a.x + beam * a.x_row + c, many) * load_some(a.weight + (a.taps - 1) * a.channels + c, many);
      for (int64_t back = 1; back < a.taps; ++back) {
        const Floats x = back <= depth ? widened_some(static_cast<const Record*>(a.own) + rows[a.steps - 1 - back] * a.channels + c, many)
                                       : load_some(before + (a.taps - 1 + depth - back) * a.channels + c, many);
        sum += x * load_some(a.weight + (a.taps - 1 - back) * a.channels + c, many);
      }
      store_some(a.out + beam * a.channels + c, sum * logistic(sum), many);
    }
  }
}

static void beam_convolution(const BeamConvolution& a, int64_t begin, int64_t end, bool keep) {
  if (a.kind == 0) keep ? keep_inputs<float>(a, begin, end) : convolve_beams<float>(a, begin, end);
  if (a.kind == 1) keep ? keep_inputs<BrainFloat>(a, begin, end) : convolve_beams<BrainFloat>(a, begin, end);
  if (a.kind == 2) keep ? keep_inputs<uint16_t>(a, begin, end) : convolve_beams<uint16_t>(a, begin, end);
}
