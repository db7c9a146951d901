/* control.c: what `make tsan` must and must not report, to show that a silence means something.
 *
 * With an argument, two threads add to one variable without an order between them: a race. Without
 * one, they hand it over at a barrier, as the operations do between preparing columns and
 * multiplying them: none, though only the OpenMP runtime knows of the barrier.
 */
#include <omp.h>
#include <stdio.h>

int main(int argc, char **argv) {
    (void)argv;
    long shared = 0;
#pragma omp parallel num_threads(2)
    {
        if (argc > 1 || omp_get_thread_num() == 0)
            for (int i = 0; i < 1000; i++) shared += i;
#pragma omp barrier
        if (omp_get_thread_num() == 1) shared += 1;
    }
    printf("%ld\n", shared);
    return 0;
}
