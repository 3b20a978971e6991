#include <stdio.h>

long part_1_7(long x);
long part_60_200(long x);

int main(void) {
    printf("%ld\n", part_1_7(5) + part_60_200(5));
    return 0;
}
