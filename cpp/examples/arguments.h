// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The command line of an example program: --name=value or --name value, by getopt_long, with
// --help.

#include <getopt.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <apex/error.h>

namespace examples {

/// The command line cannot be right; the message is one sentence with the option.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The whole of `text` as a number, at least `least`; nothing is skipped and nothing rounded.
/// @throws UsageError otherwise.
inline int64_t parse_integer(const std::string& option, std::string_view text, int64_t least) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least) {
    std::ostringstream message;
    message << option << " takes a whole number from " << least << ", not '" << text << "'";
    throw UsageError(message.str());
  }
  return value;
}

/// The whole of `text` as a finite number above 0. @throws UsageError otherwise.
inline double parse_positive(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value <= 0) {
    throw UsageError(option + " takes a number above 0, not '" + text + "'");
  }
  return value;
}

/// The options of a program; each writes into a variable that holds its default until then.
class Options {
 public:
  explicit Options(std::string purpose) : purpose_(std::move(purpose)) {}

  /// A whole number from `least`.
  template <typename Integer>
  void integer(const std::string& name, Integer& value, Integer least, const std::string& help) {
    add(name, "N", help + " (default: " + std::to_string(value) + ")",
        [&value, least, name](const std::string& text) {
          const int64_t parsed = parse_integer("--" + name, text, least);
          if (parsed > std::numeric_limits<Integer>::max()) {
            throw UsageError("--" + name + " " + text + " is too large");
          }
          value = static_cast<Integer>(parsed);
        });
  }

  /// A finite number above 0.
  void positive(const std::string& name, double& value, const std::string& help) {
    std::ostringstream described;
    described << help << " (default: " << value << ")";
    add(name, "X", described.str(),
        [&value, name](const std::string& text) { value = parse_positive("--" + name, text); });
  }

  /// One of some words.
  void choice(const std::string& name, std::string& value, const std::vector<std::string>& words,
              const std::string& help) {
    std::string list;
    for (const auto& word : words) {
      list += (list.empty() ? "" : &word == &words.back() ? " or " : ", ") + word;
    }
    add(name, "WORD", help + ": " + list + " (default: " + value + ")",
        [&value, name, words, list](const std::string& text) {
          for (const auto& word : words) {
            if (text == word) {
              value = text;
              return;
            }
          }
          throw UsageError("--" + name + " is " + list + ", not '" + text + "'");
        });
  }

  /// A file that is there.
  void input_file(const std::string& name, std::string& value, const std::string& help) {
    add(name, "FILE", help, [&value, name](const std::string& text) {
      if (!std::filesystem::is_regular_file(text)) {
        throw UsageError("--" + name + ": there is no file '" + text + "'");
      }
      value = text;
    });
  }

  /// A file to write, in a folder that is there.
  void output_file(const std::string& name, std::string& value, const std::string& help) {
    add(name, "FILE", help, [&value, name](const std::string& text) {
      const std::filesystem::path path = std::filesystem::current_path() / text;
      const bool other = std::filesystem::exists(path) && !std::filesystem::is_regular_file(path);
      if (other || !path.has_filename() || !std::filesystem::is_directory(path.parent_path())) {
        throw UsageError("--" + name + ": cannot write to '" + text +
                         "', which must be a file in a folder that exists");
      }
      value = text;
    });
  }

  /// Reads the command line. --help prints the options and ends the program.
  /// @throws UsageError
  void parse(int argc, char** argv) const {
    std::vector<option> table{{"help", no_argument, nullptr, 'h'}};
    for (const auto& each : options_) {
      table.push_back({each.name.c_str(), required_argument, nullptr, 0});
    }
    table.push_back({nullptr, 0, nullptr, 0});
    opterr = 0;  // the sentences are ours
    int index = 0;
    for (int found = 0; (found = getopt_long(argc, argv, "+:h", table.data(), &index)) != -1;) {
      const std::string given = argv[optind - 1];
      if (found == 'h') {
        print_help(argv[0]);
        std::exit(EXIT_SUCCESS);
      }
      if (found == ':') throw UsageError(given + " needs a value");
      if (found == '?') throw UsageError("there is no option " + given + "; --help lists them");
      options_[index - 1].set(optarg);
    }
    if (optind < argc) throw UsageError(std::string("nothing takes '") + argv[optind] + "'");
  }

 private:
  struct Option {
    std::string name, value, help;
    std::function<void(const std::string&)> set;
  };

  void add(const std::string& name, const std::string& value, const std::string& help,
           std::function<void(const std::string&)> set) {
    options_.push_back({name, value, help, std::move(set)});
  }

  void print_help(const char* program) const {
    std::printf("usage: %s [options]\n\n%s\n\noptions:\n", program, purpose_.c_str());
    for (const auto& each : options_) {
      const std::string usage = "--" + each.name + " " + each.value;
      std::printf("  %-22s %s\n", usage.c_str(), each.help.c_str());
    }
    std::printf("  %-22s %s\n", "--help", "this text");
  }

  std::string purpose_;
  std::vector<Option> options_;
};

/// Runs `body`. An exception becomes a sentence on stderr and the exit code: 2 for the command line
/// and for an environment that cannot be right, 1 for anything else.
inline int run_program(const char* name, const std::function<void()>& body) {
  try {
    body();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      throw std::runtime_error("cannot write the output: is there room on the disk?");
    }
    return EXIT_SUCCESS;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s: %s.\n", name, error.what());
    return 2;
  } catch (const apex::InvalidArgument& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 2;
  } catch (const c10::Error& error) {  // without its stack
    const std::string text = error.what_without_backtrace();
    std::fprintf(stderr, "%s: %s\n", name, text.substr(0, text.find('\n')).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
  }
  return EXIT_FAILURE;
}

}  // namespace examples
