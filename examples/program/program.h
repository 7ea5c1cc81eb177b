#pragma once
#include <hilt/core/device.h>
#include <hilt/ops/hilbert/attention.h>
#include <hilt/ops/hilbert/plan/order.h>
#include <hilt/ops/hilbert/plan/pattern.h>

#include <hilt/core/tensor.h>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "options.h"

// Private to examples/: what every program does around its work.

namespace program {

/// The exit status of `program` doing `work`: what work returns, or, once its exception has become
/// one line on stderr, the exception's code: that of a hilt::Error, 4 for memory, 70 for everything
/// nobody foresaw. After --debug a stack of where it was thrown follows the line; work then begins
/// twice, see Debug.
int run(const std::string& program, const std::function<int()>& work);

/// What hilt::attention_routes() tells of this thread, each line once: "forward on mma: the GPU is
/// no Hopper". After --debug, run() prints them on stderr.
std::vector<std::string> routes_taken();

/// `text` fit for a line of a terminal or a page: what is no character, or one that moves or colors
/// instead of being seen, as \xNN; those of `keep` stay.
std::string printable(std::string_view text, std::string_view keep = "");

/// A value as a message repeats it: of a long one the beginning, and how long it is.
std::string brief(const std::string& text);

/// What --device auto, cpu, cuda or cuda:N names; throws Code::gpu where there is no such GPU.
hilt::Device device_of(const std::string& text);
/// The same for one of several ranks on this machine: GPUs are dealt out by rank unless one is
/// named.
hilt::Device device_of_rank(const std::string& text, int rank);

/// What --order and --pattern mean for so many tokens. Errors name the option; Code::data where a
/// file of blocks is at fault.
hilt::Order order_of(const std::string& text, hilt::Index length);
hilt::Pattern pattern_of(const std::string& text, hilt::Index length);
/// f(), which makes a plan of these; its errors then name the options.
void plan_from(const std::string& order, const std::string& pattern, const std::function<void()>& f);

/// Bytes that this program can still get: of the machine, and of what `ulimit -v` and `-d` leave
/// it.
std::size_t memory_available();
/// Throws Code::memory where `what`, in short, needs more than that.
void require_memory(const std::string& what, std::size_t bytes, const std::string& advice);
/// What a plan takes at least, known before the time is spent to make it.
std::size_t least_plan_bytes(hilt::Index length, const hilt::Pattern& pattern);
/// Sizes that anybody may have asked for: where 64 bits end, the result is the most they hold.
std::size_t saturated_sum(std::initializer_list<std::size_t> bytes);
std::size_t saturated_product(std::initializer_list<hilt::Index> factors);

/// Where the first number of x stands that is NaN or infinite, as "nan at [0, 3]"; nothing where
/// there is none. -inf may pass: it is the lse of a row that attends to nothing.
std::optional<std::string> not_finite(const hilt::Tensor& x, bool minus_infinity_too = true);

}  // namespace program
