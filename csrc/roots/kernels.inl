// The kernels of this room for one instruction set. Included by common/for_each_isa.h.
#include "roots/lane_reduction.inl"
#include "roots/lanes.inl"
#include "roots/level_two.inl"
#include "roots/resolvent.inl"
