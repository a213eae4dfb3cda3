// The bodies of all kernels for one instruction set: included once per set, in a namespace of its own, with VECTOR_BYTES and TILE_ROWS.

#include "simd.h"
#include "beam_attention.h"
#include "prefix_attention.h"
#include "beam_select.h"
#include "rows.h"
#include "sampled_softmax.h"
#include "matrix_product.h"
#include "beam_linear_attention.h"
#include "jagged_fusion_tile.h"
#include "jagged_fusion.h"
#include "embedding_rows.h"
