/* The calls of nccl.h that a broadcast makes, with their signatures, between the memories of processes on one machine.
 *
 * As NCCL with blocking = 0: ncclCommGetAsyncError reports success when a thread has posted the broadcast on the stream.
 * The bytes arrive later, those of a stream's broadcasts in the order in which they were posted. A stream counts what was posted on it and what is done; fake_cuda.py has the Python side.
 * A unique id is the path of rank 0's socket. PENSTOCK_FAKE_NCCL is the folder of those.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { POST_US = 1000, KERNEL_US = 3000 };

typedef enum { ncclSuccess = 0, ncclInvalidArgument = 4, ncclRemoteError = 6, ncclInProgress = 7 } ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
} ncclConfig_t;
typedef struct { atomic_int posted, done; } stream_t;
typedef struct {
  int rank, size, listener, *peers;
  struct sockaddr_un at;
  atomic_int state;
  pthread_t thread;
  int has_thread;
} comm_t;
typedef struct {
  comm_t *comm;
  char *buffer;
  size_t count;
  stream_t *stream;
  pthread_t before; /* of this communicator */
  int has_before;
} op_t;

void *fakeStream(void) { return calloc(1, sizeof(stream_t)); }
int fakeStreamPosted(stream_t *stream) { return stream->posted; }
int fakeStreamDone(stream_t *stream) { return stream->done; }

const char *ncclGetErrorString(ncclResult_t code) { return code == ncclRemoteError ? "remote process exited" : "other"; }
ncclResult_t ncclGetVersion(int *version) { *version = 22703; return ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static atomic_int number;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/%d-%d", getenv("PENSTOCK_FAKE_NCCL"), getpid(), number++);
  return ncclSuccess;
}

static int whole(int peer, char *at, size_t left, int out) {
  while (left) {
    ssize_t moved = out ? send(peer, at, left, MSG_NOSIGNAL) : recv(peer, at, left, 0);
    if (moved <= 0) return 0;
    at += moved;
    left -= moved;
  }
  return 1;
}

static void *meet(void *given) {
  comm_t *comm = given;
  if (comm->rank == 0) {
    for (int peer = 1; peer < comm->size; peer++)
      if ((comm->peers[peer] = accept(comm->listener, NULL, NULL)) < 0) { comm->state = ncclRemoteError; return NULL; }
  } else {
    int peer = comm->peers[0];
    while (connect(peer, (struct sockaddr *)&comm->at, sizeof comm->at)) {
      if (comm->state != ncclInProgress) return NULL;
      usleep(1000);
    }
  }
  comm->state = ncclSuccess;
  return NULL;
}

static void start(comm_t *comm, void *(*work)(void *), void *with) {
  comm->state = ncclInProgress;
  comm->has_thread = !pthread_create(&comm->thread, NULL, work, with);
}

ncclResult_t ncclCommInitRankConfig(void **made, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  if (config->magic != 0xcafebeef || config->size != sizeof *config || config->blocking != 0) return ncclInvalidArgument;
  if (config->version != 21700) return ncclInvalidArgument; /* the fields above are those of 2.17 */
  if (config->netName || config->cgaClusterSize != INT_MIN) return ncclInvalidArgument; /* left to NCCL */
  if (config->minCTAs != 1 || config->maxCTAs != 4) return ncclInvalidArgument; /* docs/how/weights.md says so */
  comm_t *comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->size = size;
  comm->peers = calloc(size, sizeof(int));
  comm->at.sun_family = AF_UNIX;
  strncpy(comm->at.sun_path, id.internal, sizeof comm->at.sun_path - 1);
  int end = socket(AF_UNIX, SOCK_STREAM, 0);
  if (rank == 0) {
    comm->listener = end;
    if (bind(end, (struct sockaddr *)&comm->at, sizeof comm->at) || listen(end, size)) return ncclInvalidArgument;
  } else {
    comm->peers[0] = end;
  }
  *made = comm;
  start(comm, meet, comm);
  return ncclInProgress;
}

/* Until they are done, the bytes of a receiver are elsewhere: whoever reads its buffer too early finds the ones before. */
static void *move(void *given) {
  op_t *op = given;
  comm_t *comm = op->comm;
  char *arrived = comm->rank ? malloc(op->count) : op->buffer;
  int sound = 1;
  usleep(POST_US);
  int number = ++op->stream->posted;
  if (comm->state == ncclInProgress) comm->state = ncclSuccess;
  if (op->has_before) pthread_join(op->before, NULL);
  while (op->stream->done < number - 1 && comm->state != ncclRemoteError) usleep(POST_US);
  sound = comm->state != ncclRemoteError;
  usleep(KERNEL_US);
  for (int peer = 0; peer < comm->size && sound; peer++)
    if (comm->rank == 0 ? peer > 0 : peer == 0) sound = whole(comm->peers[peer], arrived, op->count, !comm->rank);
  if (comm->rank) {
    if (sound) memcpy(op->buffer, arrived, op->count);
    free(arrived);
  }
  if (sound) op->stream->done++;
  else comm->state = ncclRemoteError;
  free(op);
  return NULL;
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *given, void *stream) {
  comm_t *comm = given;
  if (from != to || type != 1 || root != 0 || !stream) return ncclInvalidArgument;
  if (comm->state == ncclInProgress) return ncclInvalidArgument; /* not posted yet: no order on the stream */
  if (comm->state == ncclRemoteError) return ncclRemoteError;
  op_t *op = calloc(1, sizeof *op);
  *op = (op_t){comm, to, count, stream, comm->thread, comm->has_thread};
  start(comm, move, op);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(void *given, ncclResult_t *state) {
  *state = ((comm_t *)given)->state;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(void *given) {
  comm_t *comm = given;
  comm->state = ncclRemoteError;
  for (int peer = 0; peer < comm->size; peer++) if (comm->peers[peer]) shutdown(comm->peers[peer], SHUT_RDWR);
  if (comm->listener) shutdown(comm->listener, SHUT_RDWR);
  if (comm->has_thread) pthread_join(comm->thread, NULL);
  for (int peer = 0; peer < comm->size; peer++) if (comm->peers[peer]) close(comm->peers[peer]);
  if (comm->listener) { close(comm->listener); unlink(comm->at.sun_path); }
  return ncclSuccess;
}
