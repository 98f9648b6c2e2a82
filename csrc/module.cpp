// The Python module dpkernels._C: what was compiled, and which instruction set runs. Operators are
// registered with PyTorch's dispatcher by each <op>/bind.cpp.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/gaussian.h"
#include "common/gemm.h"
#include "common/isa.h"

namespace py = pybind11;

namespace {

constexpr dpk::Isa kIsas[] = {dpk::Isa::portable, dpk::Isa::avx2, dpk::Isa::avx512};

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

// What the defines of setup.py and the compiler's own say of this build.
py::dict build_config() {
  py::dict config;
  config["compiler"] = compiler();
  config["cplusplus"] = static_cast<long>(__cplusplus);
  config["torch"] = DPKERNELS_TORCH_VERSION;
#if defined(DPKERNELS_CUDA_VERSION)
  config["cuda"] = DPKERNELS_CUDA_VERSION;
  config["cuda_archs"] = py::str(DPKERNELS_CUDA_ARCHS).attr("split")(";");
#else
  config["cuda"] = py::none();
  config["cuda_archs"] = py::list();
#endif
#if defined(_OPENMP)
  config["openmp"] = true;
#else
  config["openmp"] = false;
#endif
  py::list compiled;
  for (dpk::Isa isa : kIsas) {
    if (DPK_X86 || isa == dpk::Isa::portable) compiled.append(dpk::isa_name(isa));
  }
  config["instruction_sets"] = compiled;
  return config;
}

py::dict cpu_features() {
  py::dict features;
  features["avx2"] = dpk::isa_available(dpk::Isa::avx2);
  features["avx512"] = dpk::isa_available(dpk::Isa::avx512);
  features["active"] = dpk::isa_name(dpk::active_isa());
  return features;
}

void set_isa(const std::string& name) {
  for (dpk::Isa isa : kIsas) {
    if (name == dpk::isa_name(isa)) return dpk::set_isa(isa);
  }
  throw std::invalid_argument("set_isa: no instruction set '" + name +
                              "'; there are portable, avx2, avx512");
}

py::tuple philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                        uint32_t k1) {
  const dpk::PhiloxBlock block = dpk::philox4x32_10(c0, c1, c2, c3, k0, k1);
  return py::make_tuple(block.w[0], block.w[1], block.w[2], block.w[3]);
}

py::tuple continued_box_muller(uint32_t w0, uint32_t w1, uint32_t v0, uint32_t v1, uint32_t v2) {
  const uint32_t v[] = {v0, v1, v2};
  float z0, z1;
  dpk::continued_box_muller(w0, w1, v, z0, z1);
  return py::make_tuple(z0, z1);
}

template <class T>
dpk::MatrixView<T> view(const py::buffer_info& x) {
  const int64_t size = sizeof(T);
  return {static_cast<const T*>(x.ptr), x.strides[0] / size, x.strides[1] / size};
}

template <class T>
void gemm_of(const py::buffer_info& a, const py::buffer_info& b, const py::buffer_info& c,
             bool accumulate, bool upper) {
  const int64_t m = a.shape[0], k = a.shape[1], n = b.shape[1];
  T* const out = static_cast<T*>(c.ptr);
  const int64_t ldc = c.strides[0] / static_cast<int64_t>(sizeof(T));
  if (upper) {
    dpk::gemm_upper<T>(n, k, view<T>(a), view<T>(b), out, ldc, accumulate);
  } else {
    dpk::gemm<T>(m, n, k, view<T>(a), view<T>(b), out, ldc, accumulate);
  }
}

// The product that the kernels share, on anything with the buffer protocol, so that tests see it.
void gemm(const py::buffer& a_buffer, const py::buffer& b_buffer, const py::buffer& c_buffer,
          bool accumulate, bool upper) {
  const py::buffer_info a = a_buffer.request(), b = b_buffer.request(), c = c_buffer.request(true);
  const bool fits = a.ndim == 2 && b.ndim == 2 && c.ndim == 2 && a.shape[1] == b.shape[0] &&
                    c.shape[0] == a.shape[0] && c.shape[1] == b.shape[1] &&
                    (!upper || a.shape[0] == b.shape[1]) && c.strides[1] == c.itemsize;
  if (!fits) throw std::invalid_argument("gemm: shapes must be [m, k], [k, n], [m, n] by rows");
  if (a.format != b.format || a.format != c.format) {
    throw std::invalid_argument("gemm: a, b and c must share one dtype");
  }
  if (a.format == py::format_descriptor<float>::format()) {
    gemm_of<float>(a, b, c, accumulate, upper);
  } else if (a.format == py::format_descriptor<double>::format()) {
    gemm_of<double>(a, b, c, accumulate, upper);
  } else {
    throw std::invalid_argument("gemm: a must be float32 or float64");
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of dpkernels.";
  m.def("build_config", &build_config, "What this module was compiled with.");
  m.def("cpu_features", &cpu_features, "Instruction sets that this CPU has, and the active one.");
  m.def("set_isa", &set_isa, py::arg("name"), "Run all kernels on one instruction set.");
  m.def("philox4x32_10", &philox4x32_10, py::arg("c0"), py::arg("c1"), py::arg("c2"), py::arg("c3"),
        py::arg("k0"), py::arg("k1"), "One block of the noise stream's generator.");
  m.def("continued_box_muller", &continued_box_muller, py::arg("w0"), py::arg("w1"), py::arg("v0"),
        py::arg("v1"), py::arg("v2"), "Two normals of the noise stream's tail.");
  m.def("gemm", &gemm, py::arg("a"), py::arg("b"), py::arg("c"), py::arg("accumulate"),
        py::arg("upper"), "c (+)= a b in one thread; the upper triangle of it if `upper`.");
}
