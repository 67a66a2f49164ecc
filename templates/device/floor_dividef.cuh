// Floor division as Python has it (c10/util/generic_math.h, div_floor_floating).
__device__ inline float floor_dividef(float x, float y) {
    if (y == 0.0f) return x / y;
    const float mod = fmodf(x, y);
    float quotient = (x - mod) / y;
    if (mod != 0.0f && (y < 0.0f) != (mod < 0.0f)) quotient -= 1.0f;
    if (quotient == 0.0f) return copysignf(0.0f, x / y);
    const float whole = floorf(quotient);
    return quotient - whole > 0.5f ? whole + 1.0f : whole;
}
