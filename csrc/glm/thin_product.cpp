#include "glm/thin_product.h"

#include "common/element.h"
#define DPK_KERNELS "glm/thin_product.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Up to so many rows, not packing was measured to win. Ten iterations of conjugate gradients in one
// thread, as here and with gemm(): 50 clients, 100 records, 64 features, 10 / 24 / 48 / 100 classes
// 1.0 and 2.3 / 2.3 and 3.6 / 4.4 and 6.1 / 10.6 and 12.4 ms; 4 clients, 256 records, 512 features
// 1.5 and 3.0 / 2.8 and 4.5 / 5.3 and 7.5 / 10.9 and 12.5 ms.
constexpr int64_t kFewRows = 100;

}  // namespace

template <class T>
void few_rows_product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b,
                      int64_t ldb, bool padded, T* c, int64_t ldc, void* workspace) {
  if (m > kFewRows) {
    gemm<T>(m, n, k, {a, lda, 1}, {b, ldb, 1}, c, ldc, /*accumulate=*/false, workspace);
    return;
  }
  DPK_FOR_ISA(active_isa(), thin_product_of<T>)(m, n, k, a, lda, b, ldb, padded, c, ldc);
}

#define DPK_INSTANTIATE(T)                                                                  \
  template void few_rows_product<T>(int64_t, int64_t, int64_t, const T*, int64_t, const T*, \
                                    int64_t, bool, T*, int64_t, void*);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
