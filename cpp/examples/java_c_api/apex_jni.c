/* SPDX-License-Identifier: BSD-3-Clause */
/* What Apex.java declares as native: each function calls one of <apex/c_api.h>. A handle is a
 * pointer in a Java long. */

#include <apex/c_api.h>
#include <stdint.h>
#include <stdlib.h>

#include "Apex.h" /* written by javac -h */

enum { kDimensions = 8 };

static void throw_new(JNIEnv* env, const char* name, const char* message) {
  const jclass kind = (*env)->FindClass(env, name);
  if (kind != NULL) (*env)->ThrowNew(env, kind, message);
}

/* Throws what apex_last_error() tells: which rank, what happened, what to do. */
static void check(JNIEnv* env, apex_status status) {
  if (status != APEX_OK) throw_new(env, "java/lang/IllegalStateException", apex_last_error());
}

static apex_group* group_of(jlong handle) { return (apex_group*)(intptr_t)handle; }
static apex_reducer* reducer_of(jlong handle) { return (apex_reducer*)(intptr_t)handle; }

JNIEXPORT jlong JNICALL Java_Apex_init(JNIEnv* env, jclass type, jstring backend) {
  (void)type;
  const char* name = (*env)->GetStringUTFChars(env, backend, NULL);
  if (name == NULL) return 0; /* an exception is pending */
  apex_group* group = NULL;
  const apex_status status = apex_init(name, NULL, -1, -1, 0, &group);
  (*env)->ReleaseStringUTFChars(env, backend, name);
  check(env, status);
  return (jlong)(intptr_t)group;
}

JNIEXPORT void JNICALL Java_Apex_shutdown(JNIEnv* env, jclass type, jlong group) {
  (void)env, (void)type;
  apex_shutdown(group_of(group));
}

JNIEXPORT jint JNICALL Java_Apex_rank(JNIEnv* env, jclass type, jlong group) {
  (void)env, (void)type;
  return apex_rank(group_of(group));
}

JNIEXPORT jint JNICALL Java_Apex_worldSize(JNIEnv* env, jclass type, jlong group) {
  (void)env, (void)type;
  return apex_world_size(group_of(group));
}

static void all_reduce(JNIEnv* env, jlong group, jobject buffer, apex_dtype dtype, jint operation) {
  const int64_t size = (*env)->GetDirectBufferCapacity(env, buffer);
  void* const data = (*env)->GetDirectBufferAddress(env, buffer);
  const apex_tensor tensor = {data, 1, &size, NULL, dtype, -1};
  check(env, apex_all_reduce(group_of(group), &tensor, (apex_reduce_op)operation));
}

JNIEXPORT void JNICALL Java_Apex_allReduceDoubles(JNIEnv* env, jclass type, jlong group,
                                                  jobject values, jint operation) {
  (void)type;
  all_reduce(env, group, values, APEX_FLOAT64, operation);
}

JNIEXPORT void JNICALL Java_Apex_allReduceLongs(JNIEnv* env, jclass type, jlong group,
                                                jobject values, jint operation) {
  (void)type;
  all_reduce(env, group, values, APEX_INT64, operation);
}

/* A parameter or its gradient: direct memory of Java. Without strides: contiguous. */
static apex_tensor describe(JNIEnv* env, jobjectArray buffers, jsize index, jsize dim,
                            const int64_t* sizes) {
  const jobject buffer = (*env)->GetObjectArrayElement(env, buffers, index);
  void* const data = (*env)->GetDirectBufferAddress(env, buffer);
  (*env)->DeleteLocalRef(env, buffer);
  const apex_tensor tensor = {data, dim, sizes, NULL, APEX_FLOAT64, -1};
  return tensor;
}

JNIEXPORT jlong JNICALL Java_Apex_createReducer(JNIEnv* env, jclass type, jlong group,
                                                jobjectArray parameters, jobjectArray gradients,
                                                jobjectArray sizes, jlong bucket_bytes) {
  (void)type;
  const jsize count = (*env)->GetArrayLength(env, parameters);
  apex_tensor* const tensors = calloc(2 * (size_t)count + 1, sizeof *tensors);
  int64_t(*const shapes)[kDimensions] = calloc((size_t)count + 1, sizeof *shapes);
  apex_reducer* reducer = NULL;
  if (tensors == NULL || shapes == NULL) {
    throw_new(env, "java/lang/OutOfMemoryError", "apex_jni: no memory for a list of tensors");
  }
  for (jsize i = 0; i < count && !(*env)->ExceptionCheck(env); ++i) {
    const jlongArray shape = (*env)->GetObjectArrayElement(env, sizes, i);
    const jsize dim = (*env)->GetArrayLength(env, shape);
    if (dim > kDimensions) {
      throw_new(env, "java/lang/IllegalArgumentException", "apex_jni: more than 8 dimensions");
      break;
    }
    (*env)->GetLongArrayRegion(env, shape, 0, dim, (jlong*)shapes[i]);
    (*env)->DeleteLocalRef(env, shape);
    tensors[i] = describe(env, parameters, i, dim, shapes[i]);
    tensors[count + i] = describe(env, gradients, i, dim, shapes[i]);
  }
  if (!(*env)->ExceptionCheck(env)) {
    check(env, apex_reducer_create_weighted(group_of(group), tensors, tensors + count,
                                            (size_t)count, bucket_bytes, &reducer));
  }
  free(tensors);
  free(shapes);
  return (jlong)(intptr_t)reducer;
}

JNIEXPORT void JNICALL Java_Apex_setWeight(JNIEnv* env, jclass type, jlong reducer,
                                           jdouble weight) {
  (void)type;
  check(env, apex_reducer_set_weight(reducer_of(reducer), weight));
}

JNIEXPORT void JNICALL Java_Apex_gradientReady(JNIEnv* env, jclass type, jlong reducer,
                                               jint index) {
  (void)type;
  check(env, apex_reducer_gradient_ready(reducer_of(reducer), (size_t)index));
}

JNIEXPORT void JNICALL Java_Apex_synchronize(JNIEnv* env, jclass type, jlong reducer) {
  (void)type;
  check(env, apex_reducer_synchronize(reducer_of(reducer)));
}

JNIEXPORT void JNICALL Java_Apex_destroyReducer(JNIEnv* env, jclass type, jlong reducer) {
  (void)env, (void)type;
  apex_reducer_destroy(reducer_of(reducer));
}
