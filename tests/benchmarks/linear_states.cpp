// What beams of linear attention cost without a shared state, with the same vectors and the same care: a state of each beam's own, and states rebuilt from records.
// Built by linear_states.py; the structure of the call is packed there. Columns of a state are independent, so four registers of them stay at work at a time.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TILE_ROWS 12
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define TILE_ROWS 6
#else
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#endif
#include "simd.h"

constexpr int kWide = 4;

struct Step {
  int64_t beams, heads, size, steps;  // of keys and of values alike
  const float *q, *k, *v, *g, *beta;
  const float* from;  // states that beams go on from: `parents` says which
  float* to;          // their own new states, or null where records are replayed
  const int64_t* parents;
  const float *own_k, *own_delta, *own_decay;  // records of ancestors, with `rows` [beams, steps]
  const int64_t* rows;
  float *new_k, *new_delta, *new_decay;
  float* out;
};

// One head of one beam, four registers of columns: what the state gives to query and key, then the new state.
void own_state(const Step& a, const float* from, float* to, const float* q, const float* k, const float* v, float decay, float beta, float with_self, float* out) {
  Floats u_q[kWide] = {}, u_k[kWide] = {};
  for (int64_t i = 0; i < a.size; ++i)
    for (int r = 0; r < kWide; ++r) {
      const Floats s = load(from + i * a.size + r * kLanes);
      u_q[r] += s * q[i];
      u_k[r] += s * k[i];
    }
  Floats delta[kWide];
  for (int r = 0; r < kWide; ++r) {
    delta[r] = (load(v + r * kLanes) - u_k[r] * decay) * beta;
    store(out + r * kLanes, u_q[r] * decay + delta[r] * with_self);
  }
  for (int64_t i = 0; i < a.size; ++i)
    for (int r = 0; r < kWide; ++r) {
      float* place = to + i * a.size + r * kLanes;
      const Floats s = load(from + i * a.size + r * kLanes) * decay + delta[r] * k[i];
#if VECTOR_BYTES == 64
      // Past the caches where it goes elsewhere: what is written is not read again in this step.
      if (to != from) {
        _mm512_stream_ps(place, (__m512)s);
        continue;
      }
#endif
      store(place, s);
    }
}

// The same with the state rebuilt row by row from the shared one and the records.
void rebuilt(const Step& a, const float* from, const int64_t* rows, int64_t head, int64_t column, const float* weights, const float* q, const float* k, const float* v, float decay, float beta, float with_self, float* delta_out, float* out) {
  Floats u_q[kWide] = {}, u_k[kWide] = {};
  for (int64_t i = 0; i < a.size; ++i) {
    Floats s[kWide];
    for (int r = 0; r < kWide; ++r) s[r] = load(from + i * a.size + r * kLanes) * decay;
    for (int64_t j = 0; j < a.steps; ++j) {
      const float* delta = a.own_delta + (rows[j] * a.heads + head) * a.size + column;
      const float key = a.own_k[(rows[j] * a.heads + head) * a.size + i] * weights[j];
      for (int r = 0; r < kWide; ++r) s[r] += load(delta + r * kLanes) * key;
    }
    for (int r = 0; r < kWide; ++r) {
      u_q[r] += s[r] * q[i];
      u_k[r] += s[r] * k[i];
    }
  }
  for (int r = 0; r < kWide; ++r) {
    const Floats delta = (load(v + r * kLanes) - u_k[r]) * beta;
    store(delta_out + r * kLanes, delta);
    store(out + r * kLanes, u_q[r] + delta * with_self);
  }
}

}  // namespace

extern "C" void linear_states_step(const Step* given, int64_t threads) {
  const Step& a = *given;
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(threads)) if (threads > 1)
  for (int64_t beam = 0; beam < a.beams; ++beam)
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t at = (beam * a.heads + head) * a.size, whole = a.size * a.size;
      const float *q = a.q + at, *k = a.k + at, *from = a.from + (a.parents[beam] * a.heads + head) * whole;
      float with_self = 0, log = a.g[beam * a.heads + head];
      for (int64_t i = 0; i < a.size; ++i) with_self += q[i] * k[i];
      const float beta = a.beta[beam * a.heads + head];
      if (a.to) {
        for (int64_t c = 0; c < a.size; c += kWide * kLanes)
          own_state(a, from + c, a.to + (beam * a.heads + head) * whole + c, q, k, a.v + at + c, std::exp(log), beta, with_self, a.out + at + c);
        continue;
      }
      const int64_t* rows = a.rows + beam * a.steps;
      float weights[64];
      for (int64_t j = a.steps - 1; j >= 0; --j) {
        weights[j] = std::exp(log);
        log += a.own_decay[rows[j] * a.heads + head];
      }
      for (int64_t c = 0; c < a.size; c += kWide * kLanes)
        rebuilt(a, from + c, rows, head, c, weights, q, k, a.v + at + c, std::exp(log), beta, with_self, a.new_delta + at + c, a.out + at + c);
      std::memcpy(a.new_k + at, k, a.size * sizeof(float));
      a.new_decay[beam * a.heads + head] = a.g[beam * a.heads + head];
    }
#if VECTOR_BYTES == 64
  _mm_sfence();
#endif
}
