#include "common/gemm.h"

#include <memory>

#include "common/element.h"
#define DPK_KERNELS "common/gemm.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

template <class T>
void* workspace_of_this_thread() {
  // Not initialised: untouched pages of it are never brought in.
  thread_local const std::unique_ptr<char[]> memory(new char[gemm_workspace_bytes<T>()]);
  return memory.get();
}

}  // namespace

template <class T>
int64_t gemm_workspace_bytes() {
  return (GemmBlocks<T>::kPackedA + GemmBlocks<T>::kPackedB) * static_cast<int64_t>(sizeof(T));
}

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c, int64_t ldc,
          bool accumulate, void* workspace) {
  DPK_FOR_ISA(active_isa(), gemm_blocks<T>)
  (m, n, k, a, b, c, ldc, accumulate, /*upper=*/false,
   workspace ? workspace : workspace_of_this_thread<T>());
}

template <class T>
void gemm_upper(int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c, int64_t ldc,
                bool accumulate, void* workspace) {
  DPK_FOR_ISA(active_isa(), gemm_blocks<T>)
  (n, n, k, a, b, c, ldc, accumulate, /*upper=*/true,
   workspace ? workspace : workspace_of_this_thread<T>());
}

template int64_t gemm_workspace_bytes<float>();
template int64_t gemm_workspace_bytes<double>();
template void gemm<float>(int64_t, int64_t, int64_t, MatrixView<float>, MatrixView<float>, float*,
                          int64_t, bool, void*);
template void gemm<double>(int64_t, int64_t, int64_t, MatrixView<double>, MatrixView<double>,
                           double*, int64_t, bool, void*);
template void gemm_upper<float>(int64_t, int64_t, MatrixView<float>, MatrixView<float>, float*,
                                int64_t, bool, void*);
template void gemm_upper<double>(int64_t, int64_t, MatrixView<double>, MatrixView<double>, double*,
                                 int64_t, bool, void*);

}  // namespace dpk
