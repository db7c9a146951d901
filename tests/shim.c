/* shim.c: a machine that fails on command, preloaded into the `kimi` that a test starts.
 *
 * FAULTS holds rules, each `CALL PATH WHEN EFFECT`, with semicolons between them:
 *
 *   CALL    open, read, write, sync, rename, unlink, truncate; mmap (anonymous ones); thread; clock
 *   PATH    a part of the file's path, * for any. For mmap, thread and clock: of the file whose
 *           opening arms the rule
 *   WHEN    7: the seventh such call. 7+: that one and all after it. %7: every seventh
 *   EFFECT  an error's name. short: half of what was asked for. cut: the file ends where this
 *           read begins. kill: SIGKILL before the call. jump, coarse: what the clock does.
 *           none: nothing, to count calls
 *
 * Every firing, but of the clock, adds a line to the file FAULTS_FIRED: the call, and the file's
 * path or the bytes of memory. Calls that the C library makes for itself are out of reach.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_RULES 16

enum { SHORT = -1, CUT = -2, KILL = -3, JUMP = -4, COARSE = -5, NONE = -6 }; /* an effect; else an errno */

static struct rule {
    char call[16], path[256];
    long from, until, every;
    int effect, armed;
    long count;
} rules[MOST_RULES];
static int rule_count;

static const struct {
    const char *name;
    int effect;
} EFFECTS[] = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EROFS", EROFS},
    {"EACCES", EACCES}, {"EINTR", EINTR},   {"EINVAL", EINVAL}, {"ENOMEM", ENOMEM},
    {"EAGAIN", EAGAIN}, {"EMFILE", EMFILE}, {"ESTALE", ESTALE}, {"short", SHORT},
    {"cut", CUT},       {"kill", KILL},     {"jump", JUMP},     {"coarse", COARSE},
    {"none", NONE},
};

static void fail(const char *text) {
    fprintf(stderr, "shim: %s\n", text);
    _exit(99);
}

__attribute__((constructor)) static void read_rules(void) {
    const char *text = getenv("FAULTS");
    for (; text && *text; text += strcspn(text, ";"), text += *text == ';') {
        struct rule *rule = &rules[rule_count];
        char when[32], effect[16];
        if (rule_count == MOST_RULES) fail("too many rules");
        if (sscanf(text, " %15[^ ;] %255[^ ;] %31[^ ;] %15[^ ;]", rule->call, rule->path, when,
                   effect) != 4)
            fail(text);
        if (*when == '%') {
            rule->every = atol(when + 1), rule->from = 1, rule->until = -1;
        } else {
            rule->every = 1, rule->from = atol(when);
            rule->until = strchr(when, '+') ? -1 : rule->from;
        }
        for (size_t i = 0; i < sizeof EFFECTS / sizeof *EFFECTS; i++)
            if (!strcmp(effect, EFFECTS[i].name)) rule->effect = EFFECTS[i].effect;
        if (!rule->effect || rule->every < 1 || rule->from < 1) fail(text);
        rule->armed = !strcmp(rule->path, "*");
        rule_count++;
    }
}

/* Notes that a rule has done something; by hand, since `write` is ours. */
static void fired(const char *call, const char *path) {
    const char *log = getenv("FAULTS_FIRED");
    char line[4200];
    if (!log) return;
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    long fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, length);
    syscall(SYS_close, fd);
}

/* The effect on a call about the file at `path`, or about `bytes` of memory (-1: neither); 0 for
 * none. */
static int effect_of(const char *call, const char *path, long bytes) {
    char size[24];
    snprintf(size, sizeof size, "%ld", bytes);
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->call, call)) continue;
        if (path ? !strstr(path, rule->path) && strcmp(rule->path, "*") : !rule->armed) continue;
        long number = __atomic_add_fetch(&rule->count, 1, __ATOMIC_SEQ_CST);
        if (number < rule->from || (rule->until > 0 && number > rule->until)) continue;
        if (number % rule->every) continue;
        if (strcmp(call, "clock")) fired(call, path ? path : size);
        if (rule->effect == KILL) syscall(SYS_kill, getpid(), SIGKILL);
        return rule->effect;
    }
    return 0;
}

static int effect_on(const char *call, const char *path) { return effect_of(call, path, -1); }

static int effect_on_fd(const char *call, int fd) {
    char link[32], path[4096];
    if (!rule_count) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return effect_on(call, path);
}

/* -1 with errno set, if `effect` is an error. */
#define RETURN_ERROR(effect)                                                                      \
    if ((effect) > 0) {                                                                           \
        errno = (effect);                                                                         \
        return -1;                                                                                \
    }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t half(ssize_t count) { return count > 1 ? count / 2 : count; }

static void cut_at(int fd, off_t offset) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int again = (int)syscall(SYS_openat, AT_FDCWD, link, O_WRONLY | O_CLOEXEC);
    if (again < 0 || syscall(SYS_ftruncate, again, offset)) fail("the file cannot be cut");
    syscall(SYS_close, again);
}

/* ---- files by position: a direct read keeps its size, a short one just tells less of it ---- */

#define POSITIONED(name, call, type_2, type_3, type_offset)                                       \
    ssize_t name(int fd, type_2 data, type_3 count, type_offset offset) {                         \
        int effect = effect_on_fd(call, fd);                                                      \
        RETURN_ERROR(effect)                                                                      \
        if (effect == CUT) cut_at(fd, offset);                                                    \
        ssize_t done = REAL(name)(fd, data, count, offset);                                       \
        return effect == SHORT ? half(done) : done;                                               \
    }
#define POSITIONED_2(name, call, type_offset)                                                     \
    ssize_t name(int fd, const struct iovec *data, int count, type_offset offset, int flags) {    \
        int effect = effect_on_fd(call, fd);                                                      \
        RETURN_ERROR(effect)                                                                      \
        if (effect == CUT) cut_at(fd, offset);                                                    \
        ssize_t done = REAL(name)(fd, data, count, offset, flags);                                \
        return effect == SHORT ? half(done) : done;                                               \
    }

POSITIONED(pread, "read", void *, size_t, off_t)
POSITIONED(pread64, "read", void *, size_t, off64_t)
POSITIONED(preadv, "read", const struct iovec *, int, off_t)
POSITIONED(preadv64, "read", const struct iovec *, int, off64_t)
POSITIONED_2(preadv2, "read", off_t)
POSITIONED_2(preadv64v2, "read", off64_t)
POSITIONED(pwrite, "write", const void *, size_t, off_t)
POSITIONED(pwrite64, "write", const void *, size_t, off64_t)

/* ---- files in order ---- */

ssize_t read(int fd, void *data, size_t count) {
    int effect = effect_on_fd("read", fd);
    RETURN_ERROR(effect)
    if (effect == CUT) cut_at(fd, lseek(fd, 0, SEEK_CUR));
    return REAL(read)(fd, data, effect == SHORT ? (size_t)half((ssize_t)count) : count);
}

ssize_t write(int fd, const void *data, size_t count) {
    int effect = effect_on_fd("write", fd);
    RETURN_ERROR(effect)
    return REAL(write)(fd, data, effect == SHORT ? (size_t)half((ssize_t)count) : count);
}

#define ONE_FD(name, call)                                                                        \
    int name(int fd) {                                                                            \
        int effect = effect_on_fd(call, fd);                                                      \
        RETURN_ERROR(effect)                                                                      \
        return REAL(name)(fd);                                                                    \
    }
ONE_FD(fsync, "sync")
ONE_FD(fdatasync, "sync")

#define TRUNCATE(name, type_offset)                                                               \
    int name(int fd, type_offset size) {                                                          \
        int effect = effect_on_fd("truncate", fd);                                                \
        RETURN_ERROR(effect)                                                                      \
        return REAL(name)(fd, size);                                                              \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

/* ---- names ---- */

int rename(const char *old, const char *new) {
    int effect = effect_on("rename", new);
    RETURN_ERROR(effect)
    return REAL(rename)(old, new);
}

int unlink(const char *path) {
    int effect = effect_on("unlink", path);
    RETURN_ERROR(effect)
    return REAL(unlink)(path);
}

static void arm(const char *path) {
    for (int i = 0; i < rule_count; i++)
        if (strstr(path, rules[i].path)) rules[i].armed = 1;
}

#define OPEN(name)                                                                                \
    int name(const char *path, int flags, ...) {                                                  \
        va_list rest;                                                                             \
        va_start(rest, flags);                                                                    \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                 \
        va_end(rest);                                                                             \
        int effect = effect_on("open", path);                                                     \
        RETURN_ERROR(effect)                                                                      \
        arm(path);                                                                                \
        return REAL(name)(path, flags, mode);                                                     \
    }
OPEN(open)
OPEN(open64)

/* ---- memory, threads, time ---- */

#define MMAP(name, type_offset)                                                                   \
    void *name(void *at, size_t size, int protection, int flags, int fd, type_offset offset) {    \
        int effect = flags & MAP_ANONYMOUS ? effect_of("mmap", NULL, (long)size) : 0;             \
        if (effect > 0) {                                                                         \
            errno = effect;                                                                       \
            return MAP_FAILED;                                                                    \
        }                                                                                         \
        return REAL(name)(at, size, protection, flags, fd, offset);                               \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    int effect = effect_on("thread", NULL);
    return effect > 0 ? effect : REAL(pthread_create)(thread, how, run, with);
}

/* The wall clock jumps ten years back; both clocks move once in a tenth of a second. */
int clock_gettime(clockid_t id, struct timespec *now) {
    int done = (int)syscall(SYS_clock_gettime, id, now);
    if (id != CLOCK_REALTIME && id != CLOCK_MONOTONIC) return done;
    int effect = effect_on("clock", NULL);
    if (effect == JUMP && id == CLOCK_REALTIME) now->tv_sec -= 315360000;
    if (effect == COARSE) now->tv_nsec -= now->tv_nsec % 100000000;
    return done;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
