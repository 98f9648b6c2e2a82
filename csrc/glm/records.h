// From records to what their sums need: probabilities, norms and clip factors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "glm/float_residuals.h"
#include "glm/glm.h"

namespace dpk {

// Records whose probabilities are computed at a time. Measured on norms of 50 clients with 1000
// records each, 64 x 10, in one thread: blocks of 32 / 64 / 128 / 256 take 1.35 / 1.34 / 1.40 /
// 1.84 ms. 128, so that a client of 100 is one block.
constexpr int64_t kRecordBlock = 128;

// Transposed features are filled up to a multiple of so many records: two vectors of doubles, one
// of floats.
constexpr int64_t kRecordLanes = 16;
static_assert(kRecordBlock % kRecordLanes == 0);

inline int64_t padded_records(int64_t count) {
  return (count + kRecordLanes - 1) / kRecordLanes * kRecordLanes;
}

// Where the results for a range of rows go. Tables are [classes, ld]; what is null is not stored.
// A record that is left out has zeros in all of them.
template <class T>
struct RecordTable {
  int64_t ld = 0;
  T* p = nullptr;          // probabilities
  T* q = nullptr;          // 1 - p, without cancellation
  T* residuals = nullptr;  // gradient factor times p - e_y
  T* hessian_factors = nullptr;
  double* gradient_sq_norms = nullptr;
  double* hessian_sq_norms = nullptr;
  T* xt = nullptr;  // features, [features, xt_ld], filled up with zeros: not for records left out
  int64_t xt_ld = 0;

  // The same tables from column `first` on.
  RecordTable from(int64_t first) const {
    const auto at = [first](auto* start) { return start == nullptr ? nullptr : start + first; };
    return {ld,
            at(p),
            at(q),
            at(residuals),
            at(hessian_factors),
            at(gradient_sq_norms),
            at(hessian_sq_norms),
            at(xt),
            xt_ld};
  }
};

// The memory that one thread needs for the probabilities of a block.
template <class T>
class RecordScratch {
 public:
  RecordScratch(int64_t classes, int64_t features);
  std::unique_ptr<double[]> p, q, theta, sq_norms, gradient, hessian;
  std::unique_ptr<T[]> factors, xt;
  std::unique_ptr<FloatResiduals> narrow;  // of float records: their residuals are float
  // The weights that `theta` holds, widened; records of one client follow each other, and many
  // clients may share theirs.
  const T* widened = nullptr;
};

struct ClipBounds {
  double gradient;
  double hessian;
};

// Fills the table for rows [begin, end) of one client; column 0 is row `begin`. Returns whether all
// of their features are finite.
template <class T>
bool tabulate_records(const ClientRecords<T>& records, int64_t client, int64_t begin, int64_t end,
                      ClipBounds bounds, const RecordTable<T>& table, RecordScratch<T>& scratch);

// The features of some rows with those zeroed that hold a NaN or an infinity: their weight is zero,
// but zero times NaN is NaN. A copy is made only if there are such rows.
template <class T>
class FiniteRows {
 public:
  FiniteRows(const ClientRecords<T>& records, int64_t begin, int64_t end);
  // The same; nothing is looked at if it is known that all are finite.
  FiniteRows(const ClientRecords<T>& records, int64_t begin, int64_t end, bool known);
  const T* data;
  int64_t row_stride;
  int64_t count;

 private:
  std::vector<T> copy_;
};

// The records of the largest client.
template <class T>
int64_t most_records(const ClientRecords<T>& records) {
  int64_t most = 0;
  for (int64_t i = 0; i < records.clients; ++i) {
    most = std::max(most, records.spans[2 * i + 1] - records.spans[2 * i]);
  }
  return most;
}

// min(1, bound / norm), rounded towards zero; 0 for a norm that is none.
template <class T>
T clip_factor_of(double sq_norm, double bound);

// xt [features, ld] = the transpose of `count` rows; zeros fill up the last kRecordLanes columns.
template <class T>
void transpose(const T* x, int64_t row_stride, int64_t count, int64_t features, T* xt, int64_t ld);

// |row|^2 for each of `count` rows.
template <class T>
void row_squares(const T* x, int64_t row_stride, int64_t count, int64_t features, double* squares);

}  // namespace dpk
