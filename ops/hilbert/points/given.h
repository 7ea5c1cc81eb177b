#pragma once
#include "ops/hilbert/call.h"

// Private: what a call does whose plan takes an order.

namespace hilt {

/// How it takes it: not at all; rows gathered along the order, and results brought home; or, where
/// something looks at tokens, a plan made with it.
enum class TakesOrder : unsigned char { no, gathered, in_plan };
TakesOrder takes_order(const Call& call);

/// Checks AttentionOptions::permutation against a plan, but for what it says.
void check_permutation(const char* op, const Plan& plan, const Tensor& permutation, const Tensor& q);

/// The plan of a row of the batch with its order in it; row -1: of all rows, which have one order.
PlanPtr plan_along(const Call& call, Index row);

/// The order of a call, and back, as indices of rows: of one row, or where `each`, of all rows of
/// the batch one after the other.
struct GivenOrder {
  Tensor token_at, position_of;  // i64
  bool each = false;

  explicit GivenOrder(const Call& call);  // checks what it says
  /// Rows [B, L, ..] along the order, and home; ops, each the other's backward. None stays none.
  Tensor along(const Tensor& x) const;
  Tensor home(const Tensor& y) const;
  AttentionResult along(const AttentionResult& r) const;
  AttentionResult home(const AttentionResult& r) const;
};

}  // namespace hilt
