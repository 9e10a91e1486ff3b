// SPDX-License-Identifier: BSD-3-Clause
// Linked into the GoogleTest programs: writes, for each test, how long it took and which mutants it
// reached.

#include <cstring>
#include <fstream>

#include <gtest/gtest.h>

#include "apex_mutant.h"

namespace {

class Recorder : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& test) override {
    const apex_mutant::Switch& record = apex_mutant::the_switch;
    std::ofstream out(std::getenv("APEX_MUTANT_RECORD"), std::ios::app);
    const char* outcome = test.result()->Skipped()  ? "skipped"
                          : test.result()->Passed() ? "passed"
                                                    : "failed";
    out << test.test_suite_name() << '.' << test.name() << '\t' << outcome << '\t'
        << test.result()->elapsed_time() << '\t';
    for (long i = 0; i < record.size; ++i) {
      if (record.seen[i]) out << i << ' ';
    }
    out << std::endl;
    // Code between two tests counts for the second test: it may be the suite's set-up.
    std::memset(record.seen, 0, static_cast<size_t>(record.size));
  }
};

[[maybe_unused]] const bool installed = [] {
  if (apex_mutant::the_switch.seen && std::getenv("APEX_MUTANT_RECORD")) {
    testing::UnitTest::GetInstance()->listeners().Append(new Recorder);
  }
  return true;
}();

}  // namespace
