#include <stdio.h>

int main(void) {
    int c;
    long lines = 0
    while ((c = getchar()) != EOF)
        if (c == '\n')
            lines++;
    printf("%ld\n", lines);
    return 0;
}
