// What a call of jagged fused attention is given, and how its work is cut. Included once, before the instruction sets (see arguments.h).

// Field by field what kernels/native.py passes; strides count floats. Without a bias its addresses are null.
struct JaggedFusion {
  int64_t sequences, heads, share, size, value_size, buckets, positions, form;  // form: 0 SiLU, 1 softmax, 2 the bias by itself
  const float *q, *k, *v;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const int64_t *offsets, *times, *bounds;
  const float *time_weights, *position_weights;  // [heads, buckets], [heads, positions]
  float *out, *sums;                             // [T, heads, value_size]; [T, heads] logarithms of sums of exponentials
  const float* grad_out;
  int64_t grad_row, grad_head;
  float *grad_q, *grad_k, *grad_v, *grad_time, *grad_position;  // the last two null where they are not wanted
  float *time_parts, *position_parts;                           // [sequences, heads, buckets]; of each sequence [heads, length]
  float scale;                                                  // 0 stands for one over the sequence's length
};

// Key heads [group_begin, group_end) of one sequence, queries [row_begin, row_end).
struct FusionTask {
  int64_t sequence, group_begin, group_end, row_begin, row_end;
  double cost;
};

constexpr int64_t kLongestSeconds = int64_t{1} << 52;

// Bucket of a difference of time, from the bounds that Python gave: the leading bits of the difference as a double pick an interval that holds one bound at most.
class TimeBuckets {
 public:
  TimeBuckets(const int64_t* bounds, int64_t buckets) {
    for (int64_t b = 0; b + 1 < buckets; ++b) bounds_[num_++] = bounds[b];
    bounds_[num_] = INT64_MAX;
    int32_t bucket = 0;
    for (int64_t i = 0; i < kIntervals; ++i) {
      const uint64_t bits = (i + kFirst) << kShift;
      double least;
      std::memcpy(&least, &bits, 8);
      while (static_cast<double>(bounds_[bucket]) <= least) ++bucket;
      first_[i] = bucket;
    }
  }

  int32_t of(int64_t difference) const {
    const int64_t apart = std::min(std::max<int64_t>(difference < 0 ? -difference : difference, 1), kLongestSeconds);
    const double number = static_cast<double>(apart);
    uint64_t bits;
    std::memcpy(&bits, &number, 8);
    const int32_t bucket = first_[(bits >> kShift) - kFirst];
    return bucket + (apart >= bounds_[bucket]);
  }

  static constexpr int64_t kMost = 120;  // as many as have a bound that a difference can reach, see time_buckets in jagged_fusion_attention.py

 private:
  static constexpr int64_t kShift = 49, kFirst = int64_t{1023} << 3, kIntervals = 53 * 8;  // 1 to 2^52, eight intervals between powers of two
  int64_t bounds_[kMost + 1];
  int32_t first_[kIntervals];
  int32_t num_ = 0;
};

constexpr int64_t kFusionRows = 512;  // queries of one forward task, whatever the threads, so that no sum depends on them

// The longest first. Heads share the buckets of their sequence's times, so as many as leave work for every thread go together; those of a short sequence do
// too, since they lie together in memory.
static std::vector<FusionTask> fusion_tasks(const JaggedFusion& a, bool backward, int64_t threads) {
  const int64_t groups = a.heads / a.share;
  std::vector<FusionTask> tasks;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const int64_t length = a.offsets[sequence + 1] - a.offsets[sequence], rows = backward ? length : kFusionRows;
    const bool whole = length <= 128 && a.sequences >= 4 * threads;
    const int64_t together = whole ? groups : a.times && threads <= 2 ? std::max<int64_t>(1, groups / threads) : 1;
    for (int64_t begin = 0; begin < length; begin += rows)
      for (int64_t group = 0; group < groups; group += together) {
        const int64_t end = std::min(begin + rows, length), last = std::min(group + together, groups);
        const double pairs = 0.5 * (static_cast<double>(end) * end - static_cast<double>(begin) * begin) + 64.0 * (end - begin);
        tasks.push_back({sequence, group, last, begin, end, pairs * (last - group)});
      }
  }
  if (threads > 1) std::stable_sort(tasks.begin(), tasks.end(), [](const FusionTask& x, const FusionTask& y) { return x.cost > y.cost; });
  return tasks;
}

// Sums of what each sequence found for the tables, always in the order of the sequences.
static void add_fusion_parts(const JaggedFusion& a) {
  for (int64_t head = 0; head < a.heads; ++head)
    for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
      const int64_t begin = a.offsets[sequence], length = a.offsets[sequence + 1] - begin;
      if (a.grad_time && length)
        for (int64_t b = 0; b < a.buckets; ++b) a.grad_time[head * a.buckets + b] += a.time_parts[(sequence * a.heads + head) * a.buckets + b];
      if (a.grad_position) {
        const float* part = a.position_parts + begin * a.heads + head * length;
        for (int64_t d = 0; d < length; ++d) a.grad_position[head * a.positions + std::min(d, a.positions - 1)] += part[d];
      }
    }
}
