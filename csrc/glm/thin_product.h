// Products with as many rows as there are classes, in one thread.
#pragma once

#include <cstdint>

#include "common/gemm.h"

namespace dpk {

// c [m, n] = a [m, k] b [k, n], all row-major; k may be 0. For few rows, else it is gemm(), which
// takes the workspace. Columns of b from n to the next multiple of 16 are read if `padded`.
template <class T>
void few_rows_product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b,
                      int64_t ldb, bool padded, T* c, int64_t ldc, void* workspace);

}  // namespace dpk
