# Counts what one run of the tests did, from meson's testlog.json (one object a line) and the XML of each GoogleTest
# binary in `build`. A script is one test; a binary is its cases, and one failure more where it ended badly without a
# failed case to show for it: a crash, a time-out, a sanitizer's report.
# Prints each failure by name, why a script was left out and, last, `N passed, N failed, N skipped`. Exit status 1 if any failed.

function field(key,    text) {
  if (!match($0, "\"" key "\": (\"[^\"]*\"|-?[0-9]+)")) return ""
  text = substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4)
  gsub(/"/, "", text)
  return text
}

function attribute(line, key) {
  return match(line, " " key "=\"[^\"]*\"") ? substr(line, RSTART + length(key) + 3, RLENGTH - length(key) - 4) : ""
}

# What GoogleTest last said it was running, in a log that stopped there.
function last_case(    text, at, name) {
  text = $0
  while (at = index(text, "[ RUN      ] ")) {
    text = substr(text, at + 13)
    name = substr(text, 1, index(text, "\\n") - 1)
  }
  return name
}

# The last line of what it printed.
function said(    text) {
  if (!match($0, /"stdout": "([^"\\]|\\.)*"/)) return ""
  text = substr($0, RSTART + 11, RLENGTH - 12)
  sub(/(\\n)+$/, "", text)
  sub(/.*\\n/, "", text)
  gsub(/\\"/, "\"", text)
  return text
}

function why(result, code) {
  if (result == "TIMEOUT") return "timed out"
  if (code < 0) return "killed by signal " (-code in signal ? signal[-code] : -code)
  return "exit status " code
}

BEGIN {
  signal[4] = "SIGILL"; signal[6] = "SIGABRT"; signal[7] = "SIGBUS"; signal[8] = "SIGFPE"; signal[9] = "SIGKILL"; signal[11] = "SIGSEGV"
}

{
  name = field("name")
  is_script = name !~ /:gtest /
  sub(/.* \/ /, "", name)
  result = field("result")
  code = field("returncode") + 0
  cases = 0
  bad = 0
  xml = build "/" name ".xml"
  while ((getline line < xml) > 0) {
    if (line ~ /<testcase /) {
      ++cases
      this = attribute(line, "classname") "." attribute(line, "name")
      if (line ~ / result="(skipped|suppressed)"/) ++skipped
      else ++passed
      counted = 0
    } else if (line ~ /<failure / && !counted) {
      counted = 1
      ++bad
      --passed
      failures[++failed] = name ": " this
    }
  }
  close(xml)
  if (result == "OK" || result == "SKIP") {
    if (result == "OK" && is_script) ++passed
    if (!cases && result == "SKIP") {
      ++skipped
      if (said() != "") print "skipped: " name ": " said()
    }
  } else if (!bad) {
    this = last_case()
    failures[++failed] = name ": " why(result, code) (this == "" || cases ? "" : " in " this)
  }
}

END {
  for (i = 1; i <= failed; ++i) print "failed: " failures[i]
  printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
  exit failed > 0
}
