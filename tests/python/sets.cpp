// The set of a plan as C++ makes it, for attention_test.py: sets LENGTH HEADS [order=X ..]
// A line a head and token: how often it attends to each. What is not named is PlanSpec's.
#include <hilt/hilt.h>
#include <cstdlib>
#include <iostream>
#include <string_view>

using namespace hilt;

int main(int count, char** words) {
  PlanSpec spec;
  spec.length = std::atoi(words[1]), spec.heads = std::atoi(words[2]);
  for (int i = 3; i < count; ++i) {
    const std::string_view word(words[i]), name = word.substr(0, word.find('=')), value = word.substr(name.size() + 1);
    if (name == "order") spec.order = parse_order(value, spec.length);
    else if (name == "pattern") spec.pattern = parse_pattern(value);
    else if (name == "causal") spec.causality = parse_causality(value);
    else if (name == "dilation_mode") spec.dilation_mode = parse_dilation_mode(value);
    else if (name == "documents") spec.documents = parse_documents(value);
    else return 2;
  }
  const PlanPtr plan = make_plan(spec);
  for (Index head = 0; head < spec.heads; ++head)
    for (Index t = 0; t < spec.length; ++t) {
      for (Index u = 0; u < spec.length; ++u) std::cout << plan->attends(head, t, u);
      std::cout << '\n';
    }
}
