#include "glm/gram.h"

#include <cmath>

#include "common/element.h"
#define DPK_KERNELS "glm/gram.inl"
#include "common/for_each_isa.h"

namespace dpk {

template <class T>
void hessian_weights(const ClassPair<T>& pair, int64_t begin, int64_t end, T* weights) {
  DPK_FOR_ISA(active_isa(), pair_weights<T>)(pair, begin, end, weights);
}

template <class T>
void reduced_hessian_weights(const ClassPair<T>& pair, int64_t classes, int64_t begin, int64_t end,
                             T* weights) {
  const T t = T(1 / (std::sqrt(double(classes)) - 1));
  DPK_FOR_ISA(active_isa(), reduced_pair_weights<T>)(pair, classes - 1, t, begin, end, weights);
}

template <class T>
void scale_rows(const T* x, int64_t row_stride, int64_t count, int64_t features, const T* weights,
                T* out) {
  DPK_FOR_ISA(active_isa(), scale<T>)(x, row_stride, count, features, weights, out);
}

template <class T>
void mirror_upper(T* block, int64_t ld, int64_t n) {
  DPK_FOR_ISA(active_isa(), mirror<T>)(block, ld, n);
}

#define DPK_INSTANTIATE(T)                                                                      \
  template void hessian_weights<T>(const ClassPair<T>&, int64_t, int64_t, T*);                  \
  template void reduced_hessian_weights<T>(const ClassPair<T>&, int64_t, int64_t, int64_t, T*); \
  template void scale_rows<T>(const T*, int64_t, int64_t, int64_t, const T*, T*);               \
  template void mirror_upper<T>(T*, int64_t, int64_t);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
