// Causal attention of the last places of each sequence over all its places. Included once per instruction set, after beam_attention.h, whose tiles it uses.
// Places and the query heads that share a key head are the rows of one matrix product; rows ascend by place, so a block of keys starts at the first that see it.

// Rows [begin, end) of one sequence and one key head; row m is new place m / share with query head group * share + m % share.
static void prefix_attention(const PrefixAttention& a, int64_t sequence, int64_t group, int64_t begin, int64_t end) {
  const int64_t rows = end - begin, size = a.size, padded = (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  const int64_t start = a.offsets[sequence], length = a.offsets[sequence + 1] - start;
  const int64_t new_start = a.new_offsets[sequence], old = length - (a.new_offsets[sequence + 1] - new_start);
  static thread_local std::vector<float> scratch;
  static thread_local std::vector<int64_t> visible;
  const int64_t needed = rows * (size + padded + 2) + kKeys * (size + padded) + 16;
  if (static_cast<int64_t>(scratch.size()) < needed) scratch.resize(needed);
  if (static_cast<int64_t>(visible.size()) < rows) visible.resize(rows);
  float* k_DT = scratch.data() + (-(reinterpret_cast<uintptr_t>(scratch.data()) / 4) & 15);
  float* v_TD = k_DT + kKeys * size;
  float* o_MD = v_TD + kKeys * padded;
  float* q_tiles = o_MD + rows * padded;
  float* top = q_tiles + rows * size;
  float* sum = top + rows;
  std::fill(o_MD, o_MD + rows * padded, 0.0f);
  std::fill(top, top + rows, -INFINITY);
  std::fill(sum, sum + rows, 0.0f);
  for (int64_t m = 0; m < rows;) {
    const int64_t tile = rows - m >= kTileRows ? kTileRows : rows - m >= 4 ? 4 : 1;
    for (int64_t i = 0; i < tile; ++i) {
      const int64_t row = begin + m + i;
      const float* q = a.q + (new_start + row / a.share) * a.q_row + (group * a.share + row % a.share) * a.q_head;
      for (int64_t d = 0; d < size; ++d) q_tiles[m * size + d * tile + i] = q[d] * a.scale;
    }
    m += tile;
  }
  const int64_t seen_by_last = old + (end - 1) / a.share + 1;
  for (int64_t first = 0; first < seen_by_last; first += kKeys) {
    const int64_t keys = std::min(kKeys, length - first);
    const float* k = a.k + (start + first) * a.k_row + group * a.k_head;
    const float* v = a.v + (start + first) * a.v_row + group * a.v_head;
    transpose(k, a.k_row, keys, size, k_DT);
    pad(v, a.v_row, keys, size, padded, v_TD);
    // Whole tiles only: a row before the first one that sees the block sees none of it, which changes nothing since every row has seen the first block.
    const int64_t from = std::max<int64_t>(0, (first - old) * a.share - begin) / kTileRows * kTileRows;
    const int64_t all_seen = std::min(rows, std::max<int64_t>(from, (first + kKeys - 1 - old) * a.share - begin));
    const int64_t diagonal = std::min(rows, (all_seen + kTileRows - 1) / kTileRows * kTileRows);
    for (int64_t m = from; m < diagonal; ++m) visible[m] = std::min(keys, std::max<int64_t>(0, old + (begin + m) / a.share + 1 - first));
    attend_rows(diagonal - from, q_tiles + from * size, k_DT, v_TD, size, padded, keys, top + from, sum + from, o_MD + from * padded, visible.data() + from);
    attend_rows(rows - diagonal, q_tiles + diagonal * size, k_DT, v_TD, size, padded, keys, top + diagonal, sum + diagonal, o_MD + diagonal * padded);
  }
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t row = begin + m;
    const float scale = 1.0f / sum[m];
    float* out = a.out + ((new_start + row / a.share) * a.heads + group * a.share + row % a.share) * size;
    for (int64_t d = 0; d < size; ++d) out[d] = o_MD[m * padded + d] * scale;
  }
}
