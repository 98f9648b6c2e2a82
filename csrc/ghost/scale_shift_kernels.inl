// One sample at a time. Compiled once for each instruction set by for_each_isa.h.

// kRows rows of x and d added to the sums of their columns.
template <int kRows, class In>
DPK_INLINE void add_position_rows(const In* x, const In* d, int64_t width, double* products,
                                  double* sums) {
  constexpr int kStep = kLanes / 2;
  int64_t j = 0;
  for (; j + kStep <= width; j += kStep) {
    vd product = load_as<vd>(products + j), sum = load_as<vd>(sums + j);
    for (int r = 0; r < kRows; ++r) {
      const vd error = load_double(d + r * width + j);
      product += load_double(x + r * width + j) * error;
      sum += error;
    }
    store(products + j, product);
    store(sums + j, sum);
  }
  for (; j < width; ++j) {
    for (int r = 0; r < kRows; ++r) {
      const double error = to_float(d[r * width + j]);
      products[j] += to_float(x[r * width + j]) * error;
      sums[j] += error;
    }
  }
}

// Positions one after the other, [positions, width]. Four at a time, so that the sums are loaded
// and stored once for four.
template <class In>
void sums_over_rows(const void* x_data, const void* d_data, int64_t positions, int64_t width,
                    double* products, double* sums) {
  const In* x = static_cast<const In*>(x_data);
  const In* d = static_cast<const In*>(d_data);
  for (int64_t j = 0; j < width; ++j) products[j] = sums[j] = 0.0;
  int64_t t = 0;
  for (; t + 4 <= positions; t += 4) {
    add_position_rows<4>(x + t * width, d + t * width, width, products, sums);
  }
  for (; t < positions; ++t) {
    add_position_rows<1>(x + t * width, d + t * width, width, products, sums);
  }
}

// Channels one after the other, [width, positions].
template <class In>
void sums_along_rows(const void* x_data, const void* d_data, int64_t positions, int64_t width,
                     double* products, double* sums) {
  constexpr int kStep = kLanes / 2;
  // Two chains of each hide most of the latency behind four loads and four conversions.
  constexpr int kChains = 2;
  for (int64_t j = 0; j < width; ++j) {
    const In* x = static_cast<const In*>(x_data) + j * positions;
    const In* d = static_cast<const In*>(d_data) + j * positions;
    vd product[kChains], sum[kChains];
    for (int k = 0; k < kChains; ++k) product[k] = sum[k] = vd{};
    int64_t t = 0;
    for (; t + kChains * kStep <= positions; t += kChains * kStep) {
      for (int k = 0; k < kChains; ++k) {
        const vd error = load_double(d + t + k * kStep);
        product[k] += load_double(x + t + k * kStep) * error;
        sum[k] += error;
      }
    }
    products[j] = sum_of_lanes(product[0] + product[1]);
    sums[j] = sum_of_lanes(sum[0] + sum[1]);
    for (; t < positions; ++t) {
      const double error = to_float(d[t]);
      products[j] += to_float(x[t]) * error;
      sums[j] += error;
    }
  }
}
