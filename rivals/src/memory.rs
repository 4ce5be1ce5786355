//! Plain copies in one process: the base.

use std::{hint::black_box, io};

use crate::measure::{Plan, clock, measure, value};

pub(crate) fn send(plan: &Plan) -> io::Result<()> {
    plan.pin();
    for (size, count) in plan.sizes() {
        let mut bytes = vec![1; size];
        let (mut slot, mut dest) = (vec![2; size], vec![3; size]);
        let mut number = 0;
        measure("memcpy", (size, count), || {
            number += 1;
            bytes.fill(value(number));
            let begun = clock();
            black_box(&mut *dest).copy_from_slice(black_box(&bytes));
            black_box(&*dest);
            Ok([clock() - begun; 2])
        })?;
        measure("memcpy twice", (size, count), || {
            number += 1;
            bytes.fill(value(number));
            let begun = clock();
            black_box(&mut *slot).copy_from_slice(black_box(&bytes));
            black_box(&mut *dest).copy_from_slice(black_box(&*slot));
            black_box(&*dest);
            Ok([clock() - begun; 2])
        })?;
    }
    Ok(())
}
