// y = a b over the last two axes, batched over the leading ones, which broadcast.
//      da = dy b^T        db = a^T dy        summed over the batches a factor was repeated for; keeps a and b
// A factor is read in place if one of its last two strides is 1: a transposed view costs nothing.
// Where b is one matrix for the whole batch (a weight), a's batch is just more rows: one product.
#include <algorithm>
#include "core/strided.h"
#include "ops/gemm/gemm.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

/// x if one of its last two axes has stride 1 and the other steps over it, else a dense copy.
Tensor readable(const Tensor& x) {
  const auto unit = [&](int axis, int other) {
    return x.stride(axis) == 1 && (x.dim(other) == 1 || x.stride(other) >= x.dim(axis));
  };
  return unit(-1, -2) || unit(-2, -1) ? x : clone(x);
}

/// The leading axes.
Shape lead(const Tensor& x) { return Shape(std::span(x.shape().begin(), x.shape().end() - 2)); }

/// Where the factors of each product begin, of batches that `shape` broadcasts to. Neither is
/// empty.
std::array<std::vector<Index>, 2> offsets(const Shape& shape, const Tensor& x, const Tensor& y) {
  const auto strides = [&](const Tensor& t) {
    return broadcast_to("matmul", as_strided(t, lead(t), t.strides(), t.offset()), shape).strides();
  };
  const Runs<2> runs(shape, {strides(x), strides(y)});
  std::array<std::vector<Index>, 2> found;
  runs.for_rows(0, runs.rows, [&](const std::array<Index, 2>& at) {
    for (std::size_t f = 0; f < 2; ++f)
      for (Index i = 0; i < runs.run; ++i) found[f].push_back(at[f] + i * runs.step[f]);
  });
  return found;
}

Tensor product(const Tensor& x, const Tensor& y) {
  const Index m = x.dim(-2), k = x.dim(-1), n = y.dim(-1);
  const DType factors = kernels::factor_type(x), type = kernels::product_type(x);
  const Tensor a = readable(to(x, factors)), b = readable(to(y, factors));
  const Shape batches = broadcast("matmul", lead(x), lead(y));
  Shape shape = batches;
  shape.push_back(m);
  shape.push_back(n);
  if (k == 0) return zeros(shape, x.dtype(), x.device());
  Tensor out = empty(shape, type, x.device());
  if (out.numel() == 0) return to(out, x.dtype());
  const auto [from_a, from_b] = offsets(batches, a, b);
  const kernels::BatchSteps steps{batches.numel(), from_a.data(), from_b.data(), m * n};
  kernels::visit_factors("matmul", a, [&]<class T, class At>(At where) {
    kernels::gemm_batched<T>(where, steps, m, n, k, kernels::matrix<T>(a), kernels::matrix<T>(b),
                             {out.mutable_data<kernels::product_t<T, At>>(), n, 1});
  });
  return to(out, x.dtype());
}

struct Matmul final : Function {
  Shape a_shape, b_shape;
  bool b_by_columns = false;  // as a transposed weight is; db comes like that too, and goes back without a copy
  std::string_view name() const override { return "matmul"; }

  Tensor forward(const Tensor& a, const Tensor& b) {
    a_shape = a.shape(), b_shape = b.shape();
    b_by_columns = b.stride(-2) == 1 && b.dim(-1) > 1;
    if (wants(1)) save(a);
    if (wants(0)) save(b);
    if (!folds()) return product(a, b);
    return reshape(product(as_rows(a), as_rows(b)), a_shape.with(-1, b_shape[-1]));
  }

  std::vector<Tensor> backward(const Tensor& dy) override {
    Tensor da, db;
    if (wants(0)) da = sum_to(matmul(dy, transpose(saved(wants(1) ? 1 : 0))), a_shape);
    if (wants(1) && folds()) {
      const Tensor x = as_rows(saved(0)), g = as_rows(dy);
      db = reshape(b_by_columns ? transpose(product(transpose(g), x)) : product(transpose(x), g), b_shape);
    } else if (wants(1)) db = sum_to(product(transpose(saved(0)), dy), b_shape);
    return {da, db};
  }

 private:
  bool folds() const {
    for (int i = 0; i < b_shape.rank() - 2; ++i)
      if (b_shape[i] != 1) return false;
    return a_shape.rank() > 2 && b_shape.rank() <= a_shape.rank() && a_shape.numel() > 0 && b_shape.numel() > 0;
  }
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  check_alike("matmul", "a", a, "b", b);
  check(a.rank() >= 2 && b.rank() >= 2, "matmul: needs two matrices or batches of them, got ", a.shape(), " and ",
        b.shape());
  check(a.dim(-1) == b.dim(-2), "matmul: a ", a.shape(), " has ", a.dim(-1), " columns, b ", b.shape(), " has ",
        b.dim(-2), " rows");
  for (int axis = -3; - axis <= std::min(a.rank(), b.rank()); --axis)
    check(a.dim(axis) == b.dim(axis) || a.dim(axis) == 1 || b.dim(axis) == 1, "matmul: a ", a.shape(), " and b ",
          b.shape(), " do not broadcast: axis ", axis, " has ", a.dim(axis), " and ", b.dim(axis));
  visit("matmul", a, []<class T>(auto) {});
  return apply(Matmul{}, a, b);
}

}  // namespace hilt
