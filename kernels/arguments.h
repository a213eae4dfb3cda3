// What every kernel is called with, field by field as kernels/native.py packs it; strides count floats. Included once, in an unnamed namespace.

constexpr double kLowest = -1e300;  // of a valid candidate; only padding lies below it

struct BeamAttention {
  int64_t requests, width, heads, groups, share, size, steps, own_rows;
  const float* q;
  int64_t q_request, q_beam, q_head;
  const float *prompt_k, *prompt_v;
  int64_t prompt_k_row, prompt_k_head, prompt_v_row, prompt_v_head;
  const int64_t* offsets;
  const float *own_k, *own_v;
  int64_t own_k_row, own_k_head, own_v_row, own_v_head;
  const int64_t* ancestors;
  float* out;
  float scale;
};

struct PrefixAttention {
  int64_t sequences, heads, groups, share, size;
  const float* q;
  int64_t q_row, q_head;
  const int64_t* new_offsets;
  const float *k, *v;
  int64_t k_row, k_head, v_row, v_head;
  const int64_t* offsets;
  float* out;
  float scale;
};

struct NormaliseRows {
  int64_t rows, size, x_row;
  const float *x, *weight;
  float* out;
  float eps;
};

struct TurnRows {
  int64_t rows, heads, size, x_row, x_head;
  const float *x, *weight, *cosine, *sine;  // weight is null without a normalisation
  float* out;
  float eps;
};

struct GateRows {
  int64_t rows;  // of one number each
  const float *gate, *up;
  float* out;
};

struct BeamSelect {
  int64_t requests, width, room, num_codes, num_nodes, among_children;
  const float* logits;
  const int64_t *nodes, *live;
  const double* scores;
  const int64_t *widths, *offsets, *codes;
  const int64_t *leaf_bounds, *child_bounds;
  const int32_t* counts;  // null without a filter
  int64_t num_leaves;
  const int64_t *mask_of, *owners, *excluded;
  int64_t num_excluded;
  int64_t *out_parents, *out_codes, *out_nodes;
  double *out_scores, *out_steps;
  int64_t *kept, *dead_ends;
  double* dropped;
  int64_t *children, *visited;
};

struct SampledSoftmax {
  int64_t targets, rows, negatives, partners, size, kind, wide, as_logits, known;  // kind: 0 float32, 1 float16, 2 int8; wide: 64-bit rows
  const float* hidden;
  const void* table;
  const float* scales;  // null but for int8
  const int64_t* positives;
  const void* chosen;
  const float* shift;  // null without a correction
  const int64_t *takers, *sequences, *known_first, *known_begin;
  float* sums;
  const float *totals, *weights;
  float *hidden_grad, *table_grad;
  float factor, log_draws;
};

// A half-precision number; the shift of the exponent is a product, which makes numbers below the normal ones right too.
inline float half_number(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u | rest : 0;
  float value;
  std::memcpy(&value, &rest, 4);
  value *= 5.192296858534828e33f;  // 2^112
  uint32_t number;
  std::memcpy(&number, &value, 4);
  number = (special ? special : number) | sign;
  std::memcpy(&value, &number, 4);
  return value;
}

// The half-precision number nearest to a float; of two equally near the even one.
inline uint16_t half_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // below the normal ones: the sum with 1/2 has their last place where a float's is
    float small, half = 0.5f;
    std::memcpy(&small, &bits, 4);
    small += half;
    std::memcpy(&bits, &small, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13));
}

struct BeamLinear {
  int64_t beams, groups, heads, size, value_size, steps, decays, per_channel, kind;  // kind of the records: 0 float32, 1 bfloat16, 2 float16
  const float *q, *k, *v;
  int64_t q_beam, q_head, k_beam, k_head, v_beam, v_head;
  const float *g, *beta;  // beta is null without the delta rule
  const float* states;
  const int64_t* bases;
  int64_t num_states, num_records;
  void *own_k, *own_delta;
  float* own_decay;
  const int64_t* rows;
  float* out;
};

#include "jagged_fusion_plan.h"

struct GatherRows {
  int64_t count, size;
  const float* weight;
  const int64_t* ids;
  float* out;
};

// Places of `values` in the order of their segments; without an order each segment is one row.
struct RowSegments {
  int64_t count, size;
  const float* values;
  const int64_t *order, *starts;
  float* out;
};

struct RowStep {
  RowSegments segments;
  int64_t kind;  // 0 row-wise Adagrad, 1 row-wise Adam, 2 Adam
  const int64_t* ids;
  float *weight, *row_state, *first, *second, *steps;
  float rate, beta1, beta2, eps;
};

// `bits` is all zero before and after; `ranks` has one number for each of its words.
struct UniqueIds {
  int64_t count, rows;
  const int64_t* ids;
  uint64_t* bits;
  int64_t *ranks, *unique, *inverse;
};

struct SegmentOrder {
  int64_t count, segments;
  const int64_t* inverse;
  int64_t *starts, *order;
};

// `decay` and `beta` (null without the delta rule) lie row by row, as do all gradients; `chunks` is the first chunk of each sequence; `starts` and `unknown` are kept
// for the backward pass, which is wanted where `grad_state` is given; `grad_starts` and `grad_written` (each null where none is) are gradients of the states that
// chunks began with and of what tokens wrote.
struct LinearAttention {
  int64_t sequences, heads, share, size, value_size, per_channel, run;
  const float* q;
  int64_t q_row, q_head;
  const float* k;
  int64_t k_row, k_head;
  const float* v;
  int64_t v_row, v_head;
  const float *decay, *beta, *state;
  const int64_t *offsets, *chunks;
  float *out, *end, *starts, *unknown;
  const float *grad_out, *grad_end, *grad_starts, *grad_written;
  float *grad_q, *grad_k, *grad_v, *grad_decay, *grad_beta, *grad_state;
};

// `weight` and its gradient lie tap by tap; `before` (null where nothing is) holds taps - 1 rows of each sequence. The backward pass is wanted where `grad_weight` is
// given, which is zero before; it writes over `out`.
struct BeamConvolution {
  int64_t beams, channels, taps, steps, requests, num_kept, kind;  // kind of what is kept: 0 float32, 1 bfloat16, 2 float16
  const float* x;
  int64_t x_row;
  const float *weight, *before;  // weight tap by tap
  const int64_t* requests_of;
  void* own;
  const int64_t* rows;
  float* out;
};

struct ShortConvolution {
  int64_t sequences, channels, taps;
  const float* x;
  int64_t x_row;
  const float *weight, *before;
  const int64_t* offsets;
  float* out;
  const float* grad_out;
  float *grad_x, *grad_weight, *grad_before;
};
