/* Sockets, growing buffers and HTTP framing shared by engine.c, relay.c and load.c.
 *
 * These three are measuring equipment: one thread, one epoll set, edge-triggered events, and any
 * surprise ends the process with a message, because a figure taken after a surprise is worthless.
 */
#pragma once
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 8192, MAX_EVENTS = 256, READ_SIZE = 64 << 10, MAX_BUFFER = 64 << 20 };

struct buffer {
  char *data;
  size_t len, cap;
};

_Noreturn static void die(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
  exit(1);
}

/* ---- buffers ---- */

static void reserve(struct buffer *b, size_t more) {
  if (b->len + more <= b->cap) return;
  if (b->len + more > MAX_BUFFER) die("a buffer passed %d bytes: its reader does not keep up", MAX_BUFFER);
  b->cap = (b->len + more) * 2;
  b->data = realloc(b->data, b->cap);
  if (!b->data) die("out of memory");
}

static void append(struct buffer *b, const void *bytes, size_t n) {
  reserve(b, n);
  memcpy(b->data + b->len, bytes, n);
  b->len += n;
}

__attribute__((format(printf, 2, 3))) static inline void append_text(struct buffer *b, const char *format, ...) {
  char text[4096];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (n < 0 || (size_t)n >= sizeof text) die("a text is longer than %zu bytes", sizeof text);
  append(b, text, (size_t)n);
}

static inline void consume(struct buffer *b, size_t n) {
  b->len -= n;
  if (b->len) memmove(b->data, b->data + n, b->len);
}

static inline void release(struct buffer *b) {
  free(b->data);
  *b = (struct buffer){0};
}

/* ---- sockets ---- */

static inline double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static struct sockaddr_in parse_address(const char *host_and_port) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  char host[64];
  const char *colon = strrchr(host_and_port, ':');
  if (!colon || (size_t)(colon - host_and_port) >= sizeof host) die("%s is not HOST:PORT", host_and_port);
  snprintf(host, sizeof host, "%.*s", (int)(colon - host_and_port), host_and_port);
  address.sin_port = htons((uint16_t)atoi(colon + 1));
  if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die("%s is not an IPv4 address", host);
  return address;
}

static int prepared(int fd) {
  int on = 1;
  if (fd < 0) die("socket: %s", strerror(errno));
  if (fd >= MAX_FDS) die("more than %d descriptors", MAX_FDS);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (fcntl(fd, F_SETFL, O_NONBLOCK) < 0) die("fcntl: %s", strerror(errno));
  return fd;
}

static inline int listen_on(const char *host_and_port) {
  struct sockaddr_in address = parse_address(host_and_port);
  int on = 1, fd = prepared(socket(AF_INET, SOCK_STREAM, 0));
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0)
    die("listen on %s: %s", host_and_port, strerror(errno));
  return fd;
}

/* Connects before it returns: only loopback addresses are dialled, and outside measured time. */
static inline int connect_to(const char *host_and_port) {
  struct sockaddr_in address = parse_address(host_and_port);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
    die("connect to %s: %s", host_and_port, strerror(errno));
  return prepared(fd);
}

/* The peer is gone, or will send no more: a short read would not notice the end behind the data. */
enum { GONE = EPOLLERR | EPOLLHUP | EPOLLRDHUP };

/* Registered once for both directions: edge-triggered readiness costs no epoll_ctl on the way. */
static void watch(int epoll, int fd) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.fd = fd};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll_ctl: %s", strerror(errno));
}

static inline void accept_all(int epoll, int listener, void (*opened)(int fd)) {
  for (;;) {
    int fd = accept(listener, NULL, NULL);
    if (fd < 0 && (errno == EAGAIN || errno == ECONNABORTED)) return;
    prepared(fd);
    opened(fd);
    watch(epoll, fd);
  }
}

/* Reads all there is. False when the peer is gone. A short read means the socket is empty. */
static bool read_all(int fd, struct buffer *b) {
  for (;;) {
    reserve(b, READ_SIZE);
    ssize_t n = read(fd, b->data + b->len, READ_SIZE);
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    b->len += (size_t)n;
    if (n < READ_SIZE) return true;
  }
}

/* Writes what the socket takes now and keeps the rest. False when the peer is gone. */
static inline bool flush(int fd, struct buffer *b) {
  if (!b->len) return true;
  ssize_t n = send(fd, b->data, b->len, MSG_NOSIGNAL);
  if (n < 0) return errno == EAGAIN;
  consume(b, (size_t)n);
  return true;
}

/* ---- HTTP ---- */

struct message {
  size_t head_len; /* with the empty line */
  size_t body_len; /* 0 when chunked */
  bool chunked;
};

/* Value of a header inside a head, or NULL. `name` with its colon. */
static const char *find_header(const char *head, size_t head_len, const char *name) {
  size_t n = strlen(name);
  for (const char *p = head, *end = head + head_len; (p = memchr(p, '\n', (size_t)(end - p))) && ++p + n < end;)
    if (!strncasecmp(p, name, n)) return p + n + strspn(p + n, " ");
  return NULL;
}

/* False until the head is there in full. */
static inline bool parse_head(const struct buffer *b, struct message *m) {
  const char *end = b->len ? memmem(b->data, b->len, "\r\n\r\n", 4) : NULL;
  if (!end) return false;
  m->head_len = (size_t)(end - b->data) + 4;
  const char *length = find_header(b->data, m->head_len, "content-length:");
  const char *coding = find_header(b->data, m->head_len, "transfer-encoding:");
  m->body_len = length ? strtoul(length, NULL, 10) : 0;
  m->chunked = coding && !strncasecmp(coding, "chunked", 7);
  return true;
}

/* Text after the last `key` in the body (`key` with its colon), blanks skipped; NULL when absent.
 * The last one, because relay.c overrides members by appending them. */
static inline const char *find_member(const char *body, size_t len, const char *key) {
  const char *found = NULL, *end = body + len;
  size_t n = strlen(key);
  for (const char *p = body; (p = memmem(p, (size_t)(end - p), key, n));) found = p += n;
  return found ? found + strspn(found, " ") : NULL;
}

static inline bool contains(const char *bytes, size_t len, const char *text) {
  return memmem(bytes, len, text, strlen(text)) != NULL;
}

/* The value of `--name` among the arguments, or `fallback`; a NULL fallback makes it required. */
static inline const char *option(int argc, char **argv, const char *name, const char *fallback) {
  for (int i = 1; i + 1 < argc; i += 2)
    if (!strcmp(argv[i], name)) return argv[i + 1];
  if (!fallback) die("%s is missing", name);
  return fallback;
}
