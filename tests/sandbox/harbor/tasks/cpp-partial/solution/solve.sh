#!/bin/bash
cat > primes.cpp <<'END'
#include <cstdlib>
#include <iostream>

int main(int, char **arguments) {
    const int most = std::atoi(arguments[1]);
    for (int number = 2; number <= most; number++) {
        bool prime = true;
        for (int divisor = 2; divisor * divisor <= number; divisor++)
            prime = prime && number % divisor != 0;
        if (prime)
            std::cout << number << "\n";
    }
}
END
