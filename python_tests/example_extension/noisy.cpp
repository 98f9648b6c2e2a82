// Someone else's extension: its own C++ calls a dpkernels kernel on a NumPy array.
#include <pybind11/numpy.h>

#include "noise/noise.h"

PYBIND11_MODULE(noisy, m) {
  m.def("add_noise", [](pybind11::array_t<float, 0> x, double std, uint64_t key, uint64_t counter) {
    dpk::add_gaussian_noise(x.mutable_data(), x.size(), std, /*scale=*/1.0, key, counter);
  });
}
