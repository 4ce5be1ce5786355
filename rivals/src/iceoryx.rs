//! iceoryx2, by publish and subscribe: a loaned sample there, a word back through a service of its own.
//! Both sides look without a pause.

use std::{env, fmt::Display, fs, io, process};

use iceoryx2::{
    port::{publisher::Publisher, subscriber::Subscriber},
    prelude::*,
};

use crate::{
    measure::{LARGEST, Plan, check, clock, look, measure, value, warm_up},
    pair::{Pair, Requests},
};

const OPEN: u64 = 1;
/// The receiver copies each sample out.
const COPY: u64 = 2;
/// The receiver drops each sample at once.
const DROP: u64 = 3;

type Bytes = ipc::Service;

/// What a process has of the two services. The node outlives its ports.
struct Ports<P, S> {
    out: P,
    back: S,
    _node: Node<Bytes>,
}

fn other(error: impl Display) -> io::Error {
    io::Error::other(error.to_string())
}

fn node(folder: &str) -> io::Result<Node<Bytes>> {
    set_log_level(LogLevel::Error);
    let mut config = Config::default();
    let root: &[u8] = folder.as_bytes();
    config.global.set_root_path(&Path::new(root).map_err(|error| other(format!("{error:?}")))?);
    NodeBuilder::new().config(&config).create::<Bytes>().map_err(other)
}

macro_rules! service {
    ($node:expr, $name:literal, $payload:ty) => {
        $node
            .service_builder(&$name.try_into().map_err(|error| other(format!("{error:?}")))?)
            .publish_subscribe::<$payload>()
            .max_publishers(1)
            .max_subscribers(1)
            .subscriber_max_buffer_size(1)
            .subscriber_max_borrowed_samples(1)
            .history_size(0)
            .open_or_create()
            .map_err(other)?
    };
}

type Sending = Ports<Publisher<Bytes, [u8], ()>, Subscriber<Bytes, u64, ()>>;
type Receiving = Ports<Publisher<Bytes, u64, ()>, Subscriber<Bytes, [u8], ()>>;

fn sending(folder: &str) -> io::Result<Sending> {
    let node = node(folder)?;
    let bytes = service!(node, "bytes", [u8]);
    let out = bytes.publisher_builder().initial_max_slice_len(LARGEST).max_loaned_samples(1);
    let out = out.create().map_err(other)?;
    let back = service!(node, "back", u64).subscriber_builder().create().map_err(other)?;
    Ok(Ports { out, back, _node: node })
}

fn receiving(folder: &str) -> io::Result<Receiving> {
    let node = node(folder)?;
    let back = service!(node, "bytes", [u8]).subscriber_builder().create().map_err(other)?;
    let out = service!(node, "back", u64).publisher_builder().create().map_err(other)?;
    Ok(Ports { out, back, _node: node })
}

pub(crate) fn send(plan: &Plan, mut pair: Pair) -> io::Result<()> {
    let folder = env::temp_dir().join(format!("rivals-{}", process::id()));
    fs::create_dir(&folder)?;
    let outcome = send_by(folder.to_str().expect("a name of ours"), plan, &mut pair);
    let outcome = outcome.and_then(|()| pair.end());
    fs::remove_dir_all(&folder)?;
    outcome
}

fn send_by(folder: &str, plan: &Plan, pair: &mut Pair) -> io::Result<()> {
    let ports = sending(folder)?;
    pair.call(OPEN, folder);
    plan.pin();
    let mut bytes = vec![1; LARGEST];
    for (size, count) in plan.sizes() {
        let bytes = &mut bytes[..size];
        let mut number = 0;
        let text = format!("{size} {}", warm_up(count) + count);
        pair.ask(COPY, 0, &text);
        measure("iceoryx2, with both copies", (size, count), || {
            number += 1;
            bytes.fill(value(number));
            let begun = clock();
            let sample = ports.out.loan_slice_uninit(size).map_err(other)?;
            sample.write_from_slice(bytes).send().map_err(other)?;
            heard(&ports, number)?;
            Ok([clock() - begun; 2])
        })?;
        number = 0;
        pair.ask(DROP, 0, &text);
        measure("iceoryx2, in place", (size, count), || {
            number += 1;
            let sample = ports.out.loan_slice_uninit(size).map_err(other)?;
            let sample = sample.write_from_fn(|_| value(number));
            let begun = clock();
            sample.send().map_err(other)?;
            heard(&ports, number)?;
            Ok([clock() - begun; 2])
        })?;
    }
    Ok(())
}

fn heard(ports: &Sending, number: u64) -> io::Result<()> {
    let answer = look(|| ports.back.receive().map_err(other))?;
    if *answer == number { Ok(()) } else { Err(other("the answer to another sample")) }
}

pub(crate) fn receive(requests: &mut Requests) -> io::Result<()> {
    let mut ports = None;
    let mut dest = vec![1; LARGEST];
    while let Some(request) = requests.next() {
        if request.what == OPEN {
            ports = Some(receiving(request.text)?);
            requests.pin();
            requests.reply();
            continue;
        }
        let ports = ports.as_ref().expect("it opens first");
        let copies = request.what == COPY;
        let (size, count) = request.text.split_once(' ').expect("`send` wrote two");
        let size: usize = size.parse().expect("`send` wrote a length");
        let count: u64 = count.parse().expect("`send` wrote a number");
        for number in 1..=count {
            let sample = look(|| ports.back.receive().map_err(other))?;
            if copies {
                dest[..size].copy_from_slice(&sample);
            }
            drop(sample);
            ports.out.send_copy(number).map_err(other)?;
            if copies {
                check(&dest[..size], number);
            }
        }
    }
    Ok(())
}
