// A short causal convolution of each channel by itself, and SiLU: forward and backward over a block of channels. Included once per instruction set
// (see instruction_sets.h). Taps lie tap by tap, so that a register holds neighbouring channels.

constexpr int64_t kConvolved = 64;  // channels of a block: sums of gradients of the taps have one thread each

// The logistic function of x.
static inline Floats logistic(Floats x) {
  const Floats nothing = {}, one = spread(1.0f);
  x = larger(spread(-100.0f), x);
  const Floats e = exponential(x > nothing ? -x : x);
  return (x > nothing ? one : e) / (one + e);
}

// Input `back` places before token t of a sequence, out of what was kept where the sequence begins later.
static inline const float* earlier_input(const ShortConvolution& a, int64_t sequence, int64_t t, int64_t back) {
  const int64_t place = t - a.offsets[sequence] - back;
  if (place >= 0) return a.x + (t - back) * a.x_row;
  return a.before ? a.before + (sequence * (a.taps - 1) + a.taps - 1 + place) * a.channels : nullptr;
}

// Whole registers, and the channels that are left one by one through a register of their own.
static inline Floats load_some(const float* from, int64_t many) {
  if (many >= kLanes) return load(from);
  Floats value = {};
  for (int64_t i = 0; i < many; ++i) value[i] = from[i];
  return value;
}

static inline void store_some(float* to, Floats value, int64_t many) {
  if (many >= kLanes) return store(to, value);
  for (int64_t i = 0; i < many; ++i) to[i] = value[i];
}

static inline Floats convolved(const ShortConvolution& a, int64_t sequence, int64_t t, int64_t c, int64_t many) {
  Floats sum = {};
  for (int64_t back = 0; back < a.taps; ++back)
    if (const float* x = earlier_input(a, sequence, t, back)) sum += load_some(x + c, many) * load_some(a.weight + (a.taps - 1 - back) * a.channels + c, many);
  return sum;
}

static void short_convolution(const ShortConvolution& a, int64_t block) {
  const int64_t from = block * kConvolved, to = std::min(a.channels, from + kConvolved), room = a.taps - 1;
  if (!a.grad_weight) {
    for (int64_t sequence = 0; sequence < a.sequences; ++sequence)
      for (int64_t t = a.offsets[sequence]; t < a.offsets[sequence + 1]; ++t)
        for (int64_t c = from; c < to; c += kLanes) {
          const Floats sum = convolved(a, sequence, t, c, to - c);
          store_some(a.out + t * a.channels + c, sum * logistic(sum), to - c);
        }
    return;
  }
  // `out` takes the gradient of what went into SiLU.
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence)
    for (int64_t t = a.offsets[sequence]; t < a.offsets[sequence + 1]; ++t)
      for (int64_t c = from; c < to; c += kLanes) {
        const int64_t many = to - c;
        const Floats sum = convolved(a, sequence, t, c, many), share = logistic(sum);
        const Floats slope = load_some(a.grad_out + t * a.channels + c, many) * share * (spread(1.0f) + sum * (spread(1.0f) - share));
        store_some(a.out + t * a.channels + c, slope, many);
        for (int64_t back = 0; back < a.taps; ++back)
          if (const float* x = earlier_input(a, sequence, t, back)) {
            float* grad = a.grad_weight + (room - back) * a.channels + c;
            store_some(grad, load_some(grad, many) + slope * load_some(x + c, many), many);
          }
      }
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1];
    // Places before the sequence are those that were kept.
    for (int64_t t = begin - (a.grad_before ? room : 0); t < end; ++t) {
      float* to_row = t >= begin ? a.grad_x + t * a.channels : a.grad_before + (sequence * room + room + t - begin) * a.channels;
      for (int64_t c = from; c < to; c += kLanes) {
        Floats sum = {};
        for (int64_t later = std::max<int64_t>(0, begin - t); later < a.taps && t + later < end; ++later)
          sum += load_some(a.out + (t + later) * a.channels + c, to - c) * load_some(a.weight + (room - later) * a.channels + c, to - c);
        store_some(to_row + c, sum, to - c);
      }
    }
  }
}
