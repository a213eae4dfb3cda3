// What a layer does to each row by itself: normalisation, rotation, gating. Included once per instruction set (see instruction_sets.h).

// Squares of one row, summed.
static inline float squares(const float* x, int64_t size) {
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Floats left = load(x + i), right = load(x + i + kLanes);
    a += left * left;
    b += right * right;
  }
  for (; i + kLanes <= size; i += kLanes) a += load(x + i) * load(x + i);
  float sum = total(a + b);
  for (; i < size; ++i) sum += x[i] * x[i];
  return sum;
}

static void normalise_rows(const NormaliseRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x + row * a.x_row;
    float* out = a.out + row * a.size;
    const float scale = 1.0f / std::sqrt(squares(x, a.size) / static_cast<float>(a.size) + a.eps);
    int64_t i = 0;
    for (; i + kLanes <= a.size; i += kLanes) store(out + i, load(x + i) * scale * load(a.weight + i));
    for (; i < a.size; ++i) out[i] = x[i] * scale * a.weight[i];
  }
}

// Feature i of a head turns with feature i + half; without a weight nothing is normalised.
static void turn_rows(const TurnRows& a, int64_t begin, int64_t end) {
  const int64_t half = a.size / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float *cosine = a.cosine + row * half, *sine = a.sine + row * half;
    for (int64_t head = 0; head < a.heads; ++head) {
      const float* x = a.x + row * a.x_row + head * a.x_head;
      float* out = a.out + (row * a.heads + head) * a.size;
      const float scale = a.weight ? 1.0f / std::sqrt(squares(x, a.size) / static_cast<float>(a.size) + a.eps) : 1.0f;
      int64_t i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        Floats first = load(x + i) * scale, second = load(x + half + i) * scale;
        if (a.weight) first *= load(a.weight + i), second *= load(a.weight + half + i);
        const Floats c = load(cosine + i), s = load(sine + i);
        store(out + i, first * c - second * s);
        store(out + half + i, second * c + first * s);
      }
      for (; i < half; ++i) {
        const float first = x[i] * scale * (a.weight ? a.weight[i] : 1.0f), second = x[half + i] * scale * (a.weight ? a.weight[half + i] : 1.0f);
        out[i] = first * cosine[i] - second * sine[i];
        out[half + i] = second * cosine[i] + first * sine[i];
      }
    }
  }
}

// gate / (1 + e^-gate) * up, with an exponential of what is not positive. Below -100 the factor is zero to every digit; not-a-number stays.
static inline Floats gated(Floats gate, Floats up) {
  gate = larger(spread(-100.0f), gate);
  const Floats nothing = {}, one = spread(1.0f);
  const Floats e = exponential(gate > nothing ? -gate : gate);
  return gate * (gate > nothing ? one : e) / (one + e) * up;
}

static void gate_rows(const GateRows& a, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) store(a.out + i, gated(load(a.gate + i), load(a.up + i)));
  if (i < end) {
    Floats gate = {}, up = {};
    for (int64_t j = i; j < end; ++j) gate[j - i] = a.gate[j], up[j - i] = a.up[j];
    const Floats last = gated(gate, up);
    for (int64_t j = i; j < end; ++j) a.out[j] = last[j - i];
  }
}
