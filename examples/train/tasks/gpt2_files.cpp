// Files that strangers wrote for GPT-2: vocab.json and merges.txt, tokenizer.json, config.json.
//
// In them a byte is a character one can see: printable ones of Latin-1 stand for themselves, the
// others for U+0100 onwards, in order.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include "vocabulary.h"

namespace train {

using namespace hilt;
using nlohmann::json;

namespace {

/// At most 16 deep, as copying or printing JSON recurses at each level; each key of an object once.
json read_json(std::string_view text, const std::string& what) try {
  std::map<int, std::set<std::string>> keys;  // of the objects that are open, by depth
  return json::parse(text, [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth >= 16) fail_with(Code::data, what, ": nested more than 16 deep");
    if (event == json::parse_event_t::object_start) keys[depth + 1].clear();
    const bool twice = event == json::parse_event_t::key && !keys[depth].insert(parsed.get<std::string>()).second;
    return twice ? (fail_with(Code::data, what, ": ", shown(parsed.dump()), " stands there twice"), false) : true;
  });
} catch (const json::parse_error& e) {
  fail_with(Code::data, what, ": not JSON at byte ", std::max<std::size_t>(e.byte, 1) - 1);
} catch (const json::exception&) { fail_with(Code::data, what, ": a number in it is out of range"); }

/// What stands under a key of an object, which must be of that type.
const json& member(const json& in, const char* key, json::value_t type, const std::string& what) {
  const bool there = in.is_object() && in.contains(key);
  if (there && in[key].type() == type) return in[key];
  fail_with(Code::data, what, ": '", key, "' should be of type ",
            type == json::value_t::number_unsigned ? "whole number" : json(type).type_name(), ", is ",
            there ? shown(in[key].dump()) : "missing");
}

/// By byte, the character that stands for it.
const std::array<char32_t, 256>& shown_bytes() {
  static const auto shown = [] {
    std::array<char32_t, 256> of{};
    char32_t next = 256;
    for (std::size_t b = 0; b < 256; ++b)
      of[b] = (b > 32 && b < 127) || (b > 160 && b != 173) ? static_cast<char32_t>(b) : next++;
    return of;
  }();
  return shown;
}

std::string to_shown(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, shown_bytes()[static_cast<unsigned char>(c)]);
  return out;
}

/// Added tokens may hold any character, and stand for it.
std::string from_shown(const std::string& text) {
  static const auto bytes = [] {
    std::unordered_map<char32_t, char> of;
    for (std::size_t b = 0; b < 256; ++b) of[shown_bytes()[b]] = static_cast<char>(b);
    return of;
  }();
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const auto found = bytes.find(next_utf8(text, at).value_or(U'\uFFFF'));
    if (found == bytes.end()) return text;
    out += found->second;
  }
  return out;
}

[[noreturn]] void refuse(const std::string& what, const std::string& name, const json& value) {
  fail_with(Code::data, what, ": ", name, " ", value.dump(), " is not GPT-2's, which alone is known here");
}

/// Refuses what would make other tokens of a text than GPT-2's.
void check_settings(const json& all, const json& model, const std::string& what) {
  const auto plain = [&](const json& in, const char* name, const json& as) {
    if (in.contains(name) && !in[name].is_null() && in[name] != as && in[name] != "") refuse(what, name, in[name]);
  };
  plain(model, "type", "BPE");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) plain(model, name, "");
  for (const char* name : {"byte_fallback", "ignore_merges"}) plain(model, name, false);
  plain(model, "dropout", 0);
  plain(all, "normalizer", nullptr);
  if (!all.contains("pre_tokenizer")) return;
  const json& words = all["pre_tokenizer"];
  if (!words.is_object() || words.value("type", "") != "ByteLevel" || words.value("add_prefix_space", true) ||
      !words.value("use_regex", true))
    refuse(what, "pre_tokenizer", words);
}

}  // namespace

Vocabulary Vocabulary::pairs_of(const std::string& directory) {
  constexpr const char* kOption = "--tokenizer";
  const auto named = [&](const char* file) { return std::string(kOption) + " (" + directory + file + ")"; };
  const auto content = [&](const char* file) { return content_of(directory + file, kOption); };
  if (!std::filesystem::exists(directory + "/vocab.json"))
    return pairs(content("/tokenizer.json"), named("/tokenizer.json"));
  const std::string merges = content("/merges.txt");
  for (std::size_t at = 0; at < merges.size();)
    if (!next_utf8(merges, at)) fail_with(Code::data, named("/merges.txt"), ": invalid UTF-8 at byte ", at);
  json list = json::array();
  std::istringstream lines(merges);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty() && !line.starts_with("#version")) list.push_back(line);
  const json vocab = read_json(content("/vocab.json"), named("/vocab.json"));
  return pairs(json{{"model", {{"vocab", vocab}, {"merges", list}}}}.dump(), named(""));
}

Vocabulary Vocabulary::pairs(std::string_view tokenizer, const std::string& what) try {
  const std::size_t kMost = std::min(tokenizer.size() / 4, std::size_t{1} << 22);  // tokens: each takes text
  const json all = read_json(tokenizer, what);
  const json& model = member(all, "model", json::value_t::object, what);
  check_settings(all, model, what);
  Vocabulary out;
  out.alphabet_ = Alphabet::pairs;
  std::unordered_map<std::string, std::int32_t> token_of;
  const auto place = [&](const std::string& name, const json& id, const std::string& bytes) {
    const std::size_t at = id.is_number_unsigned() ? id.get<std::size_t>() : kMost;
    if (at >= kMost)
      fail_with(Code::data, what, ": token ", name, " has number ", id.dump(), ", at most ", kMost - 1, " is read");
    if (at >= out.bytes_.size()) out.bytes_.resize(at + 1);
    if (!out.bytes_[at].empty() && out.bytes_[at] != bytes)
      fail_with(Code::data, what, ": tokens ", name, " and ", to_shown(out.bytes_[at]), " both have number ", at);
    out.bytes_[at] = bytes, token_of[name] = static_cast<std::int32_t>(at);
  };
  for (const auto& [name, id] : member(model, "vocab", json::value_t::object, what).items())
    place(name, id, from_shown(name));
  for (std::size_t b = 0; b < 256; ++b) {
    const std::string byte(1, static_cast<char>(b)), name = to_shown(byte);
    if (!token_of.contains(name))
      fail_with(Code::data, what, ": its vocabulary lacks byte ", b, ", ", name, "; GPT-2's has all 256");
    out.add(byte, token_of[name]);
  }
  json merges = json::array();
  for (const json& merge : member(model, "merges", json::value_t::array, what)) {
    if (!merge.is_string() && merge.size() != 2) refuse(what, "merge", merge);
    const std::string pair = merge.is_string() ? merge.get<std::string>()
                                               : merge.at(0).get<std::string>() + ' ' + merge.at(1).get<std::string>();
    const std::size_t blank = pair.find(' ');
    const auto left = token_of.find(pair.substr(0, blank)),
               right = token_of.find(blank == pair.npos ? "" : pair.substr(blank + 1));
    const auto both =
        left == token_of.end() || right == token_of.end() ? token_of.end() : token_of.find(left->first + right->first);
    if (both == token_of.end())
      fail_with(Code::data, what, ": merge '", pair, "': its parts and what they become must be in the vocabulary");
    out.merges_.try_emplace(key(left->second, right->second),
                            Merge{static_cast<std::int32_t>(merges.size()), both->second});
    merges.push_back(to_shown(out.bytes_[static_cast<std::size_t>(left->second)]) + ' ' +
                     to_shown(out.bytes_[static_cast<std::size_t>(right->second)]));
  }
  if (all.contains("added_tokens"))
    for (const json& added : all["added_tokens"]) {
      if (!added.at("special").get<bool>()) refuse(what, "added token that is not special", added);
      place(added.at("content"), added.at("id"), added.at("content"));
    }
  json vocab = json::object();
  for (std::size_t i = 0; i < out.bytes_.size(); ++i)
    if (!out.bytes_[i].empty()) vocab[to_shown(out.bytes_[i])] = i;
  out.text_ = "bpe:" + json{{"model", {{"vocab", vocab}, {"merges", merges}}}}.dump();
  return out;
} catch (const json::exception&) {
  fail_with(Code::data, what, ": not a tokenizer of byte pairs: a value in it is of another type than GPT-2's");
}

Index heads_said(const std::string& path, const TransformerConfig& c) {
  if (!std::filesystem::exists(path)) return 0;
  const std::string what = "--from (" + path + ")";
  const json said = read_json(content_of(path, "--from"), what);
  if (!said.is_object()) fail_with(Code::data, what, ": is of type ", said.type_name(), ", expected an object");
  json here = json::parse(R"({"model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": true,
      "scale_attn_by_inverse_layer_idx": false, "add_cross_attention": false, "tie_word_embeddings": true,
      "quantization_config": null})");
  here["layer_norm_epsilon"] = c.epsilon, here["n_layer"] = c.layers, here["n_embd"] = c.width;
  here["n_positions"] = here["n_ctx"] = c.context, here["vocab_size"] = c.vocab, here["n_inner"] = c.hidden;
  for (const auto& [key, value] : here.items())
    if (said.contains(key) && !said[key].is_null() && said[key] != value)
      fail_with(Code::data, what, ": ", key, " is ", said[key].dump(), "; the tensors, or what is computed here, have ",
                value.dump());
  if (!said.contains("n_head")) return 0;
  const auto heads = member(said, "n_head", json::value_t::number_unsigned, what).get<std::uint64_t>();
  if (heads == 0 || heads > 1024 || c.width % static_cast<Index>(heads) != 0)
    fail_with(Code::data, what, ": n_head is ", heads, "; expected a divisor of the width, ", c.width);
  return static_cast<Index>(heads);
}

}  // namespace train
