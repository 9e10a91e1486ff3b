// SPDX-License-Identifier: BSD-3-Clause

import java.nio.DoubleBuffer;
import java.util.Arrays;
import java.util.function.IntConsumer;
import java.util.stream.IntStream;

/**
 * Trains a network of two layers on several ranks, with gradients computed by hand, and compares
 * each step with one process that has all samples. README.md has the command.
 */
final class Train {
  static final int SAMPLES = 400, INPUTS = 6, HIDDEN = 16, EPOCHS = 20;
  static final int BATCH = 25; // does not divide by two: the ranks' parts differ in size
  static final double RATE = 0.2;
  static final double TOLERANCE = 1e-10; // of the largest gradient
  static final long BUCKET_BYTES = 128; // the second layer's weights fill one
  /** Weights and bias of the first layer, weights and bias of the second. */
  static final long[][] SIZES = {{HIDDEN, INPUTS}, {HIDDEN}, {HIDDEN}, {1}};

  /** Uniform in [-1, 1), by a linear congruential generator. */
  static final class Random {
    private int state;

    Random(int seed) {
      state = seed;
    }

    double next() {
      state = state * 1664525 + 1013904223;
      return Integer.toUnsignedLong(state) / 2147483648.0 - 1.0;
    }
  }

  static DoubleBuffer[] zeros() {
    return Arrays.stream(SIZES)
        .map(sizes -> Apex.newDoubles((int) Arrays.stream(sizes).reduce(1, (a, b) -> a * b)))
        .toArray(DoubleBuffer[] ::new);
  }

  /**
   * Fills the gradients of the summed squared error over samples first to last, and calls ready
   * with the index of each as soon as it is computed. Returns the sum.
   */
  static double backward(DoubleBuffer[] parameters, DoubleBuffer[] gradients, double[][] x,
      double[] y, int first, int last, IntConsumer ready) {
    DoubleBuffer w1 = parameters[0], b1 = parameters[1], w2 = parameters[2], b2 = parameters[3];
    for (DoubleBuffer gradient : gradients) fill(gradient, 0.0);
    double[][] hidden = new double[last - first][HIDDEN];
    double[] ofOutput = new double[last - first]; // the gradient of each sample's output
    double loss = 0.0;
    for (int s = 0; s < last - first; ++s) {
      double output = b2.get(0);
      for (int unit = 0; unit < HIDDEN; ++unit) {
        double sum = 0.0;
        for (int i = 0; i < INPUTS; ++i) sum += w1.get(unit * INPUTS + i) * x[first + s][i];
        hidden[s][unit] = Math.tanh(b1.get(unit) + sum);
        output += w2.get(unit) * hidden[s][unit];
      }
      double error = output - y[first + s];
      loss += error * error;
      ofOutput[s] = 2.0 * error;
      add(gradients[3], 0, ofOutput[s]);
      for (int unit = 0; unit < HIDDEN; ++unit)
        add(gradients[2], unit, ofOutput[s] * hidden[s][unit]);
    }
    ready.accept(3);
    ready.accept(2); // travels while the loop below runs
    for (int s = 0; s < last - first; ++s) {
      for (int unit = 0; unit < HIDDEN; ++unit) {
        double ofSum = ofOutput[s] * w2.get(unit) * (1.0 - hidden[s][unit] * hidden[s][unit]);
        add(gradients[1], unit, ofSum);
        for (int i = 0; i < INPUTS; ++i)
          add(gradients[0], unit * INPUTS + i, ofSum * x[first + s][i]);
      }
    }
    ready.accept(1);
    ready.accept(0);
    return loss;
  }

  static void add(DoubleBuffer to, int index, double value) {
    to.put(index, to.get(index) + value);
  }

  static void fill(DoubleBuffer buffer, double value) {
    for (int i = 0; i < buffer.capacity(); ++i) buffer.put(i, value);
  }

  static void step(DoubleBuffer[] parameters, DoubleBuffer[] gradients) {
    for (int p = 0; p < parameters.length; ++p) {
      for (int i = 0; i < parameters[p].capacity(); ++i) {
        add(parameters[p], i, -(RATE * gradients[p].get(i)));
      }
    }
  }

  static double[] flattened(DoubleBuffer[] buffers) {
    return Arrays.stream(buffers)
        .flatMapToDouble(b -> IntStream.range(0, b.capacity()).mapToDouble(b::get))
        .toArray();
  }

  /** Whether each number is near the expected one, by the largest of these. */
  static boolean close(DoubleBuffer[] found, DoubleBuffer[] expected) {
    double[] one = flattened(found), other = flattened(expected);
    double largest = Arrays.stream(other).map(Math::abs).max().getAsDouble();
    return IntStream.range(0, other.length)
        .allMatch(i -> Math.abs(one[i] - other[i]) <= TOLERANCE * largest);
  }

  static void train(Apex.Group group) {
    int rank = group.rank(), ranks = group.worldSize();
    Random random = new Random(1); // all ranks draw the same samples
    double[][] x = new double[SAMPLES][INPUTS];
    double[] y = new double[SAMPLES];
    for (int s = 0; s < SAMPLES; ++s) {
      for (int i = 0; i < INPUTS; ++i) {
        x[s][i] = random.next();
        y[s] += Math.sin(x[s][i]);
      }
    }
    Random own = new Random(100 + rank); // the reducer takes rank 0's parameters
    DoubleBuffer[] parameters = zeros(), gradients = zeros();
    for (int p : new int[] {0, 2}) {
      for (int i = 0; i < parameters[p].capacity(); ++i) parameters[p].put(i, 0.5 * own.next());
    }
    DoubleBuffer[] alone = zeros(), aloneGradients = zeros(); // one process, the reference

    try (Apex.Reducer reducer =
             new Apex.Reducer(group, parameters, gradients, SIZES, BUCKET_BYTES)) {
      for (int p = 0; p < SIZES.length; ++p) alone[p].put(parameters[p].duplicate()).clear();
      for (int epoch = 1; epoch <= EPOCHS; ++epoch) {
        DoubleBuffer loss = Apex.newDoubles(1);
        for (int start = 0; start < SAMPLES; start += BATCH) {
          int first = start + BATCH * rank / ranks, last = start + BATCH * (rank + 1) / ranks;
          reducer.setWeight(last - first);
          add(loss, 0, backward(parameters, gradients, x, y, first, last, reducer::gradientReady));
          reducer.synchronize();
          step(parameters, gradients);

          backward(alone, aloneGradients, x, y, start, start + BATCH, index -> {});
          for (DoubleBuffer sum : aloneGradients) {
            for (int i = 0; i < sum.capacity(); ++i) sum.put(i, sum.get(i) / BATCH);
          }
          step(alone, aloneGradients);
          if (!close(gradients, aloneGradients)) {
            throw new IllegalStateException(String.format(
                "rank %d, epoch %d: gradients differ from those of one process", rank, epoch));
          }
        }
        group.allReduce(loss, Apex.SUM);
        if (rank == 0 && epoch % 5 == 0) {
          System.out.printf("epoch %d: loss %.6f%n", epoch, loss.get(0) / SAMPLES);
        }
      }
      if (!group.ranksAgree(flattened(parameters))) {
        throw new IllegalStateException("the ranks have different parameters");
      }
      if (!close(parameters, alone)) {
        throw new IllegalStateException("parameters differ from those of one process");
      }
      if (rank == 0) {
        System.out.printf(
            "ranks: %d; parameters bitwise equal, gradients those of one process%n", ranks);
      }
    }
  }

  public static void main(String[] arguments) {
    try (Apex.Group group = new Apex.Group("gloo")) {
      train(group);
    } catch (IllegalStateException error) {
      System.err.println("train: " + error.getMessage());
      System.exit(1);
    }
  }
}
