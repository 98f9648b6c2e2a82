#include "glm/float_residuals.h"

#include "clip/clip.h"
#include "common/element.h"
#include "glm/records.h"
#define DPK_KERNELS "glm/float_residuals.inl"
#include "common/for_each_isa.h"

namespace dpk {

bool FloatResiduals::clip(const ResidualJob& job) {
  return DPK_FOR_ISA(active_isa(), clip_residuals)(job, xt_.get(), logits_.get());
}

}  // namespace dpk
