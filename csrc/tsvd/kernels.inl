// The inner loops of one instruction set: see common/for_each_isa.h.

#include "tsvd/hermitian.inl"

// kLanes neighbouring elements of all clients at a time: stage[k] is client k's vector. Lanes past
// `lanes` keep what they had.
DPK_INLINE void gather_clients(const float* x, const ClientStrides& strides, int64_t clients,
                               int64_t lanes, float* stage) {
  if (strides.col == 1 && lanes == kLanes) {
    for (int64_t k = 0; k < clients; ++k) {
      store(stage + k * kLanes, load_float(x + k * strides.client));
    }
    return;
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const float* const element = x + lane * strides.col;
    for (int64_t k = 0; k < clients; ++k) stage[k * kLanes + lane] = element[k * strides.client];
  }
}

DPK_INLINE void scatter_clients(float* out, const ClientStrides& strides, int64_t clients,
                                int64_t lanes, const float* stage) {
  if (strides.col == 1 && lanes == kLanes) {
    for (int64_t k = 0; k < clients; ++k) {
      store(out + k * strides.client, load_float(stage + k * kLanes));
    }
    return;
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    float* const element = out + lane * strides.col;
    for (int64_t k = 0; k < clients; ++k) element[k * strides.client] = stage[k * kLanes + lane];
  }
}

DPK_INLINE void store_lanes(float* to, vf v, int64_t lanes) {
  if (lanes == kLanes) {
    store(to, v);
  } else {
    for (int64_t lane = 0; lane < lanes; ++lane) to[lane] = v[lane];
  }
}

DPK_INLINE vf load_lanes(const float* from, int64_t lanes) {
  if (lanes == kLanes) return load_float(from);
  vf v = vf{};
  for (int64_t lane = 0; lane < lanes; ++lane) v[lane] = from[lane];
  return v;
}

// Rows [begin, end) of all slices: F_s = sum_k x_k exp(-2 pi i s k / K). Clients k and K - k have
// conjugate factors, so that sums of pairs make the real parts and differences the imaginary ones:
// a quarter of the plain product. cosines and sines are [K/2 + 1, K/2 + 1]. Returns whether
// everything was finite.
bool rows_to_slices(const ClientTensor& layer, const float* cosines, const float* sines,
                    int64_t begin, int64_t end, float* stage) {
  const int64_t clients = layer.clients, half = clients / 2, pairs = (clients - 1) / 2;
  const int64_t slice_size = layer.rows * 2 * layer.cols;
  for (int64_t k = 0; k < clients; ++k) store(stage + k * kLanes, vf{});
  const auto client = [&](int64_t k) { return load_float(stage + k * kLanes); };
  vf poison = vf{};
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t j = 0; j < layer.cols; j += kLanes) {
      const int64_t lanes = layer.cols - j < kLanes ? layer.cols - j : kLanes;
      gather_clients(layer.x + r * layer.x_strides.row + j * layer.x_strides.col, layer.x_strides,
                     clients, lanes, stage);
      for (int64_t k = 1; k <= pairs; ++k) {
        const vf a = client(k), b = client(clients - k);
        store(stage + k * kLanes, a + b);
        store(stage + (clients - k) * kLanes, a - b);
      }
      const vf first = client(0), last = clients % 2 == 0 ? client(half) : vf{};
      float* to = layer.planes + r * 2 * layer.cols + j;
      for (int64_t s = 0; s <= half; ++s, to += slice_size) {
        const float* const cosine = cosines + s * (half + 1);
        const float* const sine = sines + s * (half + 1);
        vf re = s % 2 == 0 ? first + last : first - last, im = vf{};
        for (int64_t k = 1; k <= pairs; ++k) {
          re += cosine[k] * client(k);
          im -= sine[k] * client(clients - k);
        }
        poison += re * 0.0f + im * 0.0f;  // NaN from then on if one of them is not finite
        store_lanes(to, re, lanes);
        if (!layer.slice_is_real(s)) store_lanes(to + layer.cols, im, lanes);
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(poison[lane] == 0.0f)) return false;
  }
  return true;
}

// The inverse: x_k = (Y_0 + 2 sum_s Re(Y_s exp(2 pi i s k / K))) / K, where Y_{K/2} counts once.
// slices[s]: rows [begin, end) of slice s, 2 cols apart.
void rows_from_slices(const ClientTensor& layer, const float* cosines, const float* sines,
                      int64_t begin, int64_t end, const float* const* slices, float* stage) {
  const int64_t clients = layer.clients, half = clients / 2, pairs = (clients - 1) / 2;
  float* const planes = stage + clients * kLanes;  // the real, then the imaginary parts
  const float factor = 1.0f / float(clients);
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t j = 0; j < layer.cols; j += kLanes) {
      const int64_t lanes = layer.cols - j < kLanes ? layer.cols - j : kLanes;
      const int64_t at = (r - begin) * 2 * layer.cols + j;
      for (int64_t s = 1; s <= pairs; ++s) {
        store(planes + s * kLanes, 2.0f * load_lanes(slices[s] + at, lanes));
        store(planes + (half + s) * kLanes, 2.0f * load_lanes(slices[s] + at + layer.cols, lanes));
      }
      const vf first = load_lanes(slices[0] + at, lanes);
      const vf last = clients % 2 == 0 ? load_lanes(slices[half] + at, lanes) : vf{};
      for (int64_t k = 0; k <= half; ++k) {
        const float* const cosine = cosines + k * (half + 1);
        const float* const sine = sines + k * (half + 1);
        vf even = k % 2 == 0 ? first + last : first - last, odd = vf{};
        for (int64_t s = 1; s <= pairs; ++s) {
          even += cosine[s] * load_float(planes + s * kLanes);
          odd += sine[s] * load_float(planes + (half + s) * kLanes);
        }
        store(stage + k * kLanes, (even - odd) * factor);
        if (k > 0) store(stage + (clients - k) * kLanes, (even + odd) * factor);
      }
      scatter_clients(layer.out + r * layer.out_strides.row + j * layer.out_strides.col,
                      layer.out_strides, clients, lanes, stage);
    }
  }
}

void to_double(const float* x, int64_t n, double* to) {
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) store(to + i, load_double(x + i));
  for (; i < n; ++i) to[i] = x[i];
}
