#pragma once
#include <hilt/hilt.h>
#include <nlohmann/json.hpp>

// Private to train: JSON that strangers wrote. What is wrong is Code::data, opened by `what`.

namespace train {

using nlohmann::json;

/// All of a text, a regular file of at most 1 GiB; the error names `option`.
std::string content_of(const std::string& path, const char* option);
/// Nested no more than 16 deep: who copies or prints JSON calls itself at each level.
json read_json(std::string_view text, const std::string& what);
/// What stands under a key of an object, which must be of that kind.
const json& member(const json& in, const char* key, json::value_t kind, const std::string& what);

}  // namespace train
