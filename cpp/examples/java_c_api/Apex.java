// SPDX-License-Identifier: BSD-3-Clause

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.LongBuffer;

/** What this program calls of &lt;apex/c_api.h&gt;. Failures are IllegalStateExceptions. */
final class Apex {
  static final int SUM = 0, MIN = 1, MAX = 2;

  static {
    System.loadLibrary("apex_jni");
  }

  private Apex() {}

  /** A process's place in the job, which the launcher's environment variables describe. */
  static final class Group implements AutoCloseable {
    private long handle;

    Group(String backend) {
      handle = init(backend);
    }

    int rank() {
      return Apex.rank(handle);
    }

    int worldSize() {
      return Apex.worldSize(handle);
    }

    /** In place. */
    void allReduce(DoubleBuffer values, int operation) {
      allReduceDoubles(handle, values, operation);
    }

    /** Whether all ranks have the same bits. */
    boolean ranksAgree(double[] values) {
      LongBuffer least = newBytes(values.length).asLongBuffer();
      LongBuffer most = newBytes(values.length).asLongBuffer();
      for (int i = 0; i < values.length; ++i) {
        least.put(i, Double.doubleToRawLongBits(values[i]));
        most.put(i, Double.doubleToRawLongBits(values[i]));
      }
      allReduceLongs(handle, least, MIN);
      allReduceLongs(handle, most, MAX);
      return least.equals(most);
    }

    @Override
    public void close() {
      shutdown(handle);
      handle = 0; // refused from now on
    }
  }

  /** Averages gradients over the ranks, in the memory of buffers, which it keeps. */
  static final class Reducer implements AutoCloseable {
    final DoubleBuffer[] parameters, gradients;
    private long handle;

    /**
     * Of gradients that are sums over samples. The parameters become rank 0's. bucketBytes: the
     * size at which a bucket of gradients is closed; 0 for the default.
     */
    Reducer(Group group, DoubleBuffer[] parameters, DoubleBuffer[] gradients, long[][] sizes,
        long bucketBytes) {
      this.parameters = parameters;
      this.gradients = gradients;
      handle = createReducer(group.handle, parameters, gradients, sizes, bucketBytes);
    }

    /** Before the gradients of each step: how many samples they are sums over. */
    void setWeight(double weight) {
      Apex.setWeight(handle, weight);
    }

    /** The engine may send this gradient from now on. */
    void gradientReady(int index) {
      Apex.gradientReady(handle, index);
    }

    /** The end of backward: all gradients are the mean over the samples of all ranks. */
    void synchronize() {
      Apex.synchronize(handle);
    }

    @Override
    public void close() {
      destroyReducer(handle);
      handle = 0;
    }
  }

  /** Outside of Java's heap, where the garbage collector moves nothing. */
  static DoubleBuffer newDoubles(int count) {
    return newBytes(count).asDoubleBuffer();
  }

  private static ByteBuffer newBytes(int count) {
    return ByteBuffer.allocateDirect(8 * count).order(ByteOrder.nativeOrder());
  }

  // In apex_jni.c. Buffers must be direct.
  private static native long init(String backend);
  private static native void shutdown(long group);
  private static native int rank(long group);
  private static native int worldSize(long group);
  private static native void allReduceDoubles(long group, DoubleBuffer values, int operation);
  private static native void allReduceLongs(long group, LongBuffer values, int operation);
  private static native long createReducer(long group, DoubleBuffer[] parameters,
      DoubleBuffer[] gradients, long[][] sizes, long bucketBytes);
  private static native void setWeight(long reducer, double weight);
  private static native void gradientReady(long reducer, int index);
  private static native void synchronize(long reducer);
  private static native void destroyReducer(long reducer);
}
