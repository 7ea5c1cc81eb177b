// A grammar as a graph of draws. With W(s) the weight of a draw's options that begin with s,
// character j of option o costs its -ln p given all before it, for none is another's beginning:
//      cost_j(o) = ln W(o[0..j)) - ln W(o[0..j])          sum_j cost_j(o) = -ln p(o)
//
// What comes when: with a(n, m, i) the probability that node n begins at place i of a story while
// memory m, of lengths, is held,
//      cost(i + j) += a(n, m, i) p(o) cost_j(o)           a(next, m', i + |o|) += a(n, m, i) p(o)
// Stories put one after the other renew: with u(k) the probability that one begins at k,
//      u(k) = sum_n u(k - n) p(length = n)                floor(L) = 1/L sum_{t < L} sum_k u(k) cost(t - k)
#include "stories.h"
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <set>
#include <sstream>

namespace train {

using namespace hilt;

const Profile kStoriesTask{.name = "stories",
                           .help = "from a grammar whose entropy is known",
                           .row = "run of text",
                           .target = "character",
                           .options = "prompt temperature top-k top-p stop tokens",
                           .before = "the symbol before",
                           .reader = "grammar",
                           .pays = "grammar's entropy",
                           .knows = "all that was said before",
                           .floor =
                               "the grammar and all that was said: no reader does better on average over all "
                               "rows; on few rows luck may"};

namespace {

constexpr std::string_view kStories = R"(
hero   = 8 Anna | 7 Mia | 6 Lucy | 5 Rosa | 5 Emma | 4 Nora | 3 Ida | 3 Zoe | 2 Vera | 2 Olga
friend = 8 Tom | 7 Ben | 6 Max | 5 Jack | 5 Paul | 4 Leo | 3 Finn | 3 Hugo | 2 Carl | 2 Will
color  = 6 red | 5 blue | 4 green | 4 white | 3 black | 2 yellow | 2 pink | 2 brown
thing  = 6 ball | 5 kite | 5 boat | 4 drum | 4 lamp | 3 hat | 3 coat | 2 violin | 2 wagon | 2 ring
place  = 5 by the lake | 4 in the woods | 4 on the hill | 3 near the mill | 2 at the farm | 2 under the bridge
does   = 5 sings | 4 waits | 4 sleeps | 3 reads | 3 digs | 2 cooks | 2 fishes | 1 works
food   = 5 bread | 4 soup | 4 cake | 3 plums | 3 rice | 2 honey | 2 nuts | 1 fish
drink  = 5 milk | 4 tea | 3 water | 2 juice
animal = 5 dog | 4 fox | 3 hen | 3 goose | 2 bear | 2 mouse | 1 wolf | 1 snake
act    = 4 runs by | 3 sits down | 3 wants some | 2 jumps up | 2 looks on | 1 hides

start: 1 "{hero} has a {color} {thing}. {friend} {does} {place}. " >day
day:   6 "One day" >meet
day:   5 "At noon" >meet
day:   4 "On Sunday" >meet
day:   3 "Later" >meet
meet:  1 " {=hero} meets {=friend} {=place}. " >event
event: 5 "They share {food} and {drink}. " >more
event: 5 "A {animal} {act}. " >more
more:  2 "Then they" >play
more:  4 "Now" >keep
more:  3 "At last" >home
play:  4 " dance. " >last
play:  3 " laugh. " >last
play:  2 " rest. " >last
last:  4 "Now" >keep
last:  3 "At last" >home
keep:  1 " {=friend} has the {=color} {=thing}."
home:  1 " {=hero} goes home with the {=color} {=thing}."
)";

struct Way {
  double weight;
  std::string text, next;
};

}  // namespace

// Reads all lines first, then builds: labels and lists may be used before they are defined.
Grammar::Grammar(std::string_view source) {
  std::map<std::string, std::vector<Option>> lists;
  std::map<std::string, std::vector<Way>> ways;
  for (const std::string_view line : split_text(source, '\n')) {
    std::istringstream in{std::string(line)};
    std::string name, word, next;
    double weight = 0;
    if (!(in >> name)) continue;
    if (name.back() == ':') {
      in >> weight >> std::quoted(word) >> next;
      ways[name.substr(0, name.size() - 1)].push_back({weight, word, next.substr(next.starts_with('>'))});
    } else {
      for (in >> word; in >> weight;) {
        std::getline(in >> std::ws, word, '|');
        word.erase(word.find_last_not_of(' ') + 1);
        lists[name].push_back({word, weight, kEnd, {}});
      }
    }
  }
  check(ways.contains("start"), "Grammar: no line `start:`");
  std::vector<std::string> registers;  // of the lists that are said again
  for (const auto& [name, words] : lists)
    if (source.find("{=" + name + "}") != source.npos) registers.push_back(name);
  check(registers.size() <= kRegisters, "Grammar: ", registers.size(), " lists are said again, at most ",
        int{kRegisters}, " can be");

  std::map<std::string, int> node_of;  // `start` first, for it opens
  nodes_.emplace_back(), node_of["start"] = 0;
  for (const auto& [label, unused] : ways)
    if (label != "start") node_of[label] = static_cast<int>(nodes_.size()), nodes_.emplace_back();
  for (const auto& [label, of_label] : ways) {
    const auto fork = at(node_of[label]);
    for (const Way& way : of_label) {
      const std::string text = way.text + (way.next.empty() ? "\n" : "");
      const int after = way.next.empty() ? kEnd : node_of.at(way.next);
      const auto here = [&] { return static_cast<int>(nodes_.size()); };
      std::size_t at = std::min(text.find('{'), text.size());
      nodes_[fork].options.push_back({text.substr(0, at), way.weight, at == text.size() ? after : here(), {}});
      while (at < text.size()) {  // a brace, then perhaps plain text; each a node
        const std::size_t close = text.find('}', at);
        const bool again = text[at + 1] == '=';
        const std::string list = text.substr(at + 1 + again, close - at - 1 - again);
        const std::size_t plain = close + 1, open = std::min(text.find('{', plain), text.size());
        const auto next = [&](std::size_t end) { return end == text.size() ? after : here() + 1; };
        Node node{.options = lists.at(list)};
        for (Option& o : node.options) o.next = next(plain);
        const auto found = std::ranges::find(registers, list);
        if (found != registers.end()) (again ? node.recall : node.store) = static_cast<int>(found - registers.begin());
        nodes_.push_back(std::move(node));
        if (open > plain) nodes_.push_back({.options = {{text.substr(plain, open - plain), 1, next(open), {}}}});
        at = open;
      }
    }
    price(nodes_[fork], "label '" + label + "'");
  }
  for (std::size_t n = ways.size(); n < nodes_.size(); ++n) price(nodes_[n], "a list");

  std::set<char> letters;
  for (const Node& node : nodes_)
    for (const Option& option : node.options) letters.insert(option.text.begin(), option.text.end());
  alphabet_.assign(letters.begin(), letters.end());
  analyze();
}

void Grammar::price(Node& node, const std::string& where) {
  double total = 0;
  for (const Option& o : node.options) total += o.p;
  for (Option& o : node.options) {
    check(o.p > 0 && (node.options.size() == 1 || !o.text.empty()), "Grammar: ", where,
          ": expected a weight above 0, and a text where there is a choice");
    o.p /= total;
  }
  for (Option& o : node.options) {
    double before = 1;
    for (std::size_t j = 1; j <= o.text.size(); ++j) {
      double share = 0;
      for (const Option& other : node.options) {
        check(&other == &o || j < o.text.size() || !other.text.starts_with(o.text), "Grammar: ", where, ": '", o.text,
              "' is the beginning of '", other.text, "'; a text would have two derivations");
        if (std::string_view(other.text).substr(0, j) == std::string_view(o.text).substr(0, j)) share += other.p;
      }
      o.cost.push_back(share == before ? 0 : std::log(before / share));
      before = share;
    }
  }
}

std::string Grammar::story(Draws& draws) const {
  std::string text;
  std::array<std::size_t, kRegisters> memory{};
  for (int n = 0; n != kEnd;) {
    const Node& node = nodes_[at(n)];
    std::size_t pick = 0;
    if (node.recall >= 0) {
      pick = memory[at(node.recall)];
    } else if (node.options.size() > 1) {
      double left = draws.uniform();
      while (pick + 1 < node.options.size() && left >= node.options[pick].p) left -= node.options[pick++].p;
    }
    if (node.store >= 0) memory[at(node.store)] = pick;
    text += node.options[pick].text;
    n = node.options[pick].next;
  }
  return text;
}

std::vector<double> Grammar::costs(std::string_view text) const {
  std::vector<double> out;
  out.reserve(text.size());
  std::array<std::size_t, kRegisters> memory{};
  for (int n = 0; out.size() < text.size();) {
    const Node& node = nodes_[at(n)];
    const std::string_view rest = text.substr(out.size());
    std::size_t pick = node.options.size(), agreed = 0;  // the option that agrees with the text for longest
    for (std::size_t i = 0; i < node.options.size(); ++i) {
      if (node.recall >= 0 && i != memory[at(node.recall)]) continue;
      const std::string& option = node.options[i].text;
      const auto same = static_cast<std::size_t>(std::ranges::mismatch(option, rest).in1 - option.begin());
      if (pick == node.options.size() || same > agreed) pick = i, agreed = same;
    }
    const Option& option = node.options[pick];
    if (agreed < std::min(option.text.size(), rest.size()))
      fail_with(Code::data, "Grammar: no story continues with '",
                rest[agreed] == '\n' ? std::string("\\n") : std::string(1, rest[agreed]), "' at character ",
                out.size() + agreed);
    for (std::size_t j = 0; j < agreed; ++j) out.push_back(node.recall >= 0 ? 0 : option.cost[j]);
    if (node.store >= 0) memory[at(node.store)] = pick;
    n = option.next == kEnd ? 0 : option.next;
  }
  return out;
}

void Grammar::analyze() {
  using State = std::pair<int, Memory>;  // node; lengths of the words remembered
  std::map<std::size_t, std::map<State, double>> open;
  open[0][{0, Memory{}}] = 1;
  const auto grow = [](std::vector<double>& v, std::size_t n) { v.resize(std::max(v.size(), n)); };
  constexpr double kNegligible = 1e-18;  // what is left of a loop that may go on for ever
  while (!open.empty()) {
    const std::size_t place = open.begin()->first;
    std::map<State, double>& states = open.begin()->second;
    while (!states.empty()) {  // a node without text leads to another at the same place
      const auto [state, p] = *states.begin();
      states.erase(states.begin());
      if (p < kNegligible) continue;
      const Node& node = nodes_[at(state.first)];
      double share = 1;  // of a remembered word's length among the words it was drawn from
      if (node.recall >= 0) {
        share = 0;
        for (const Option& o : node.options)
          share += static_cast<Index>(o.text.size()) == state.second[at(node.recall)] ? o.p : 0;
      }
      for (const Option& o : node.options) {
        if (node.recall >= 0 && static_cast<Index>(o.text.size()) != state.second[at(node.recall)]) continue;
        const double q = p * o.p / share;
        grow(cost_at_, place + o.text.size()), grow(forgetful_cost_at_, place + o.text.size());
        for (std::size_t j = 0; j < o.text.size(); ++j) {
          forgetful_cost_at_[place + j] += q * o.cost[j];
          if (node.recall < 0) cost_at_[place + j] += q * o.cost[j];
        }
        const std::size_t end = place + o.text.size();
        if (o.next == kEnd) {
          grow(length_p_, end + 1);
          length_p_[end] += q;
          continue;
        }
        Memory memory = state.second;
        if (node.store >= 0) memory[at(node.store)] = static_cast<std::int8_t>(o.text.size());
        (end == place ? states : open[end])[{o.next, memory}] += q;
      }
    }
    open.erase(open.begin());
  }
  for (double c : cost_at_) entropy_ += c;
  for (std::size_t n = 0; n < length_p_.size(); ++n) mean_length_ += static_cast<double>(n) * length_p_[n];
}

double Grammar::mean_cost(const std::vector<double>& by_place, Index length) const {
  const auto n = static_cast<std::size_t>(length);
  std::vector<double> begins(n, 0.0);
  double total = 0;
  for (std::size_t t = 0; t < n; ++t) {
    begins[t] = t == 0 ? 1 : 0;
    for (std::size_t k = 1; k <= t && k < length_p_.size(); ++k) begins[t] += begins[t - k] * length_p_[k];
    for (std::size_t k = 0; k <= t && k < by_place.size(); ++k) total += begins[t - k] * by_place[k];
  }
  return total / static_cast<double>(n);
}

const Grammar& story_grammar() {
  static const Grammar grammar(kStories);
  return grammar;
}

bool is_held_out(std::string_view story) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : story) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return (hash >> 32) % 10 == 0;
}

// ---- the task -----------------------------------------------------------------------------------
namespace {

class StoriesTask : public Task {
 public:
  using Task::Task;
  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    Draws draws = drawn(split, number);
    std::string text = "\n";
    while (static_cast<Index>(text.size()) <= length_) {
      const std::string story = story_grammar().story(draws);
      if (is_held_out(story) == (split == Split::validation)) text += story;
    }
    const std::vector<std::int32_t> tokens = vocabulary_.encode(text, "stories");
    std::copy_n(tokens.data(), length_, inputs);
    std::copy_n(tokens.data() + 1, length_, targets);
  }
  Exact exact(const std::int32_t*, const std::int32_t* targets) const override {
    const auto costs = story_grammar().costs(vocabulary_.decode({targets, at(length_)}));
    return {std::accumulate(costs.begin(), costs.end(), 0.0)};
  }
  double floor() const override { return story_grammar().floor(length_); }
  double floor_without_memory() const override { return story_grammar().floor_without_memory(length_); }
};

}  // namespace

std::unique_ptr<Task> stories_task(Index length, std::uint64_t seed) {
  check(length >= 1, "stories: a row of ", length, " characters");
  const std::string& letters = story_grammar().alphabet();
  return std::make_unique<StoriesTask>(Vocabulary::characters({letters.begin(), letters.end()}), length, seed);
}

}  // namespace train
