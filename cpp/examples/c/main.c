/* SPDX-License-Identifier: BSD-3-Clause */
/* Trains a network of two layers on handwritten digits, in C99, with gradients computed by hand:
 *
 *     torchrun --no-python --nproc_per_node=2 ./c_digits digits.bin
 *
 * Every rank takes its part of each batch. The gradients of the second layer travel while those of
 * the first are computed. */

#include <apex/c_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kUsage = 2 }; /* the exit code of a command line or an environment that is wrong */
enum { kTrain = 1437, kTest = 360, kPixels = 64, kHidden = 32, kDigits = 10, kBatch = 64 };

typedef struct {
  float w1[kHidden][kPixels], b1[kHidden];
  float w2[kDigits][kHidden], b2[kDigits];
} Net;

typedef struct {
  float pixels[kTrain + kTest][kPixels];
  int labels[kTrain + kTest];
} Digits;

static void check(apex_status status) {
  if (status == APEX_OK) return;
  fprintf(stderr, "c_digits: %s\n", apex_last_error());
  exit(status == APEX_INVALID_ARGUMENT ? kUsage : EXIT_FAILURE);
}

static void read_digits(const char* path, Digits* digits) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) {
    fprintf(stderr, "c_digits: cannot read %s: name the file digits.bin\n", path);
    exit(kUsage);
  }
  for (int i = 0; i < kTrain + kTest; ++i) {
    unsigned char record[kPixels + 1];
    if (fread(record, sizeof record, 1, file) != 1) {
      fprintf(stderr, "c_digits: %s is too short\n", path);
      exit(EXIT_FAILURE);
    }
    for (int j = 0; j < kPixels; ++j) digits->pixels[i][j] = (float)record[j] / 16.0f;
    digits->labels[i] = record[kPixels];
  }
  fclose(file);
}

static unsigned random_state = 12345;
static unsigned next_random(void) { return random_state = random_state * 1664525u + 1013904223u; }

static void initialize(float* weights, int count, double scale) {
  for (int i = 0; i < count; ++i)
    weights[i] = (float)(scale * (next_random() / 4294967296.0 * 2 - 1));
}

/* Fills `hidden` and `probability` of one image, and returns the most likely digit. */
static int forward(const Net* net, const float* pixels, float* hidden, float* probability) {
  for (int i = 0; i < kHidden; ++i) {
    float sum = net->b1[i];
    for (int j = 0; j < kPixels; ++j) sum += net->w1[i][j] * pixels[j];
    hidden[i] = tanhf(sum);
  }
  int best = 0;
  float total = 0;
  for (int i = 0; i < kDigits; ++i) {
    probability[i] = net->b2[i];
    for (int j = 0; j < kHidden; ++j) probability[i] += net->w2[i][j] * hidden[j];
    if (probability[i] > probability[best]) best = i;
  }
  const float highest = probability[best];
  for (int i = 0; i < kDigits; ++i) total += probability[i] = expf(probability[i] - highest);
  for (int i = 0; i < kDigits; ++i) probability[i] /= total;
  return best;
}

/* One tensor of the network: its parameters and their gradients have the same shape. */
static apex_tensor describe(float* data, int64_t dim, const int64_t* sizes) {
  const apex_tensor tensor = {data, dim, sizes, NULL, APEX_FLOAT32, -1};
  return tensor;
}

static void describe_all(Net* net, apex_tensor* tensors) {
  static const int64_t kSizes1[] = {kHidden, kPixels}, kSizes2[] = {kDigits, kHidden};
  static const int64_t kHiddenSize[] = {kHidden}, kDigitsSize[] = {kDigits};
  tensors[0] = describe(&net->w1[0][0], 2, kSizes1);
  tensors[1] = describe(net->b1, 1, kHiddenSize);
  tensors[2] = describe(&net->w2[0][0], 2, kSizes2);
  tensors[3] = describe(net->b2, 1, kDigitsSize);
}

static Digits digits;
static Net net, gradient;
static float hidden[kBatch][kHidden], probability[kBatch][kDigits];

/* Gradients of the mean loss over `count` samples, of which this rank has `mine`, times the number
 * of ranks, since they are averaged. Returns the sum of this rank's losses. */
static double backward(apex_reducer* reducer, const int* samples, int mine, int count, int ranks) {
  const float scale = (float)ranks / (float)count;
  double loss = 0;
  gradient = (Net){0};
  for (int s = 0; s < mine; ++s) {
    const int label = digits.labels[samples[s]];
    forward(&net, digits.pixels[samples[s]], hidden[s], probability[s]);
    loss -= log(probability[s][label]);
    probability[s][label] -= 1; /* now the gradient of the second layer's output */
    for (int i = 0; i < kDigits; ++i) {
      gradient.b2[i] += scale * probability[s][i];
      for (int j = 0; j < kHidden; ++j)
        gradient.w2[i][j] += scale * probability[s][i] * hidden[s][j];
    }
  }
  check(apex_reducer_gradient_ready(reducer, 3));
  check(apex_reducer_gradient_ready(reducer, 2));
  for (int s = 0; s < mine; ++s) {
    for (int i = 0; i < kHidden; ++i) {
      float sum = 0;
      for (int j = 0; j < kDigits; ++j) sum += probability[s][j] * net.w2[j][i];
      sum *= scale * (1 - hidden[s][i] * hidden[s][i]);
      gradient.b1[i] += sum;
      for (int j = 0; j < kPixels; ++j) gradient.w1[i][j] += sum * digits.pixels[samples[s]][j];
    }
  }
  check(apex_reducer_gradient_ready(reducer, 1));
  check(apex_reducer_gradient_ready(reducer, 0));
  check(apex_reducer_synchronize(reducer));
  return loss;
}

static void step(float* parameters, const float* gradients, size_t count) {
  for (size_t i = 0; i < count; ++i) parameters[i] -= 0.5f * gradients[i];
}

/* This rank's part of `count` items: the first, and how many. */
static int part_of(int count, int rank, int ranks, int* first) {
  *first = (int)((long)count * rank / ranks);
  return (int)((long)count * (rank + 1) / ranks) - *first;
}

int main(int argc, char** argv) {
  const char* const usage = "usage: c_digits digits.bin (the file beside the program), or --help";
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    printf("%s\n\nTrains a network of two layers on handwritten digits.\n", usage);
    return EXIT_SUCCESS;
  }
  if (argc != 2) {
    fprintf(stderr, "%s\n", usage);
    return kUsage;
  }
  read_digits(argv[1], &digits);
  apex_group* group = NULL;
  check(apex_init("gloo", NULL, -1, -1, 0, &group));
  const int rank = apex_rank(group), ranks = apex_world_size(group);

  random_state += (unsigned)rank; /* the reducer makes the ranks equal */
  initialize(&net.w1[0][0], kHidden * kPixels, 0.2);
  initialize(&net.w2[0][0], kDigits * kHidden, 0.2);
  apex_tensor parameters[4], gradients[4];
  describe_all(&net, parameters);
  describe_all(&gradient, gradients);
  apex_reducer* reducer = NULL;
  check(apex_reducer_create(group, parameters, gradients, 4, 1024, &reducer));

  int order[kTrain];
  for (int i = 0; i < kTrain; ++i) order[i] = i;
  random_state = 1; /* from here on all ranks draw the same numbers */
  for (int epoch = 1; epoch <= 10; ++epoch) {
    for (int i = kTrain - 1; i > 0; --i) {
      const int other = (int)(next_random() / 65536u) % (i + 1), kept = order[i];
      order[i] = order[other];
      order[other] = kept;
    }
    double sums[2] = {0, 0}; /* losses, right answers */
    int first = 0;
    for (int start = 0; start < kTrain; start += kBatch) {
      const int count = kTrain - start < kBatch ? kTrain - start : kBatch;
      const int mine = part_of(count, rank, ranks, &first);
      sums[0] += backward(reducer, order + start + first, mine, count, ranks);
      step(&net.w1[0][0], &gradient.w1[0][0], sizeof net / sizeof(float));
    }
    const int mine = part_of(kTest, rank, ranks, &first);
    for (int i = kTrain + first; i < kTrain + first + mine; ++i)
      sums[1] += forward(&net, digits.pixels[i], hidden[0], probability[0]) == digits.labels[i];
    const int64_t two[] = {2};
    const apex_tensor all = {sums, 1, two, NULL, APEX_FLOAT64, -1};
    check(apex_all_reduce(group, &all, APEX_SUM));
    if (rank == 0) {
      printf("epoch %d: loss %.6f, test accuracy %.2f %%\n", epoch, sums[0] / kTrain,
             100 * sums[1] / kTest);
    }
  }
  apex_reducer_destroy(reducer);
  apex_shutdown(group);
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "c_digits: cannot write the output\n");
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
