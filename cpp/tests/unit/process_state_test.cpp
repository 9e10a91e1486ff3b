#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include "comm/process_state.h"

// The oracle is what the test itself does to a process.

namespace apex::parallel {
namespace {

/// A child that tells its name, and then waits for ever.
class Child {
 public:
  Child() {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      const std::string name = this_process()->encode();
      if (::write(ends[1], name.data(), name.size()) < 0) ::_exit(1);
      ::close(ends[1]);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    std::string text(4096, '\0');
    const ssize_t length = ::read(ends[0], text.data(), text.size());
    ::close(ends[0]);
    name_ = *ProcessName::decode(text.substr(0, static_cast<size_t>(length)));
  }
  ~Child() {
    kill();
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  const ProcessName& name() const { return name_; }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  void go_on() const {
    ::kill(pid_, SIGCONT);
    ::waitpid(pid_, nullptr, WCONTINUED);
  }
  void kill() const { ::kill(pid_, SIGKILL); }
  void become_zombie() const {
    kill();
    siginfo_t info;
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

 private:
  pid_t pid_ = -1;
  ProcessName name_;
};

class ProcessStateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!this_process()) GTEST_SKIP() << "no /proc";
  }
};

TEST_F(ProcessStateTest, Process_RunsIsStoppedAndGoesOn_IsToldSo) {
  const Child child;
  EXPECT_EQ(state_of(child.name()), ProcessState::kUnknown);
  child.stop();
  EXPECT_EQ(state_of(child.name()), ProcessState::kStopped);
  child.go_on();
  EXPECT_EQ(state_of(child.name()), ProcessState::kUnknown);
}

TEST_F(ProcessStateTest, ProcessThatNobodyHasWaitedFor_HasEnded) {
  const Child child;
  child.become_zombie();
  EXPECT_EQ(state_of(child.name()), ProcessState::kEnded);
}

TEST_F(ProcessStateTest, ProcessThatIsGone_HasEnded) {
  ProcessName name;
  {
    const Child child;
    name = child.name();
  }
  EXPECT_EQ(state_of(name), ProcessState::kEnded);
}

TEST_F(ProcessStateTest, NumberThatIsUsedAgain_IsAnotherProcess) {
  ProcessName earlier = *this_process();
  ++earlier.start_time;
  EXPECT_EQ(state_of(earlier), ProcessState::kEnded);
}

TEST_F(ProcessStateTest, ProcessOfAnotherHost_IsNotKnown) {
  ProcessName elsewhere = *this_process();
  elsewhere.host += "x";
  elsewhere.pid = 1 << 30;
  EXPECT_EQ(state_of(elsewhere), ProcessState::kUnknown);
}

TEST_F(ProcessStateTest, Name_EncodedAndDecoded_IsTheSame) {
  const ProcessName name = *this_process();
  const auto decoded = ProcessName::decode(name.encode());
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->host, name.host);
  EXPECT_EQ(decoded->pid, name.pid);
  EXPECT_EQ(decoded->start_time, name.start_time);
  EXPECT_FALSE(ProcessName::decode("something else"));
}

}  // namespace
}  // namespace apex::parallel
