//! Sizes and shapes.

use std::time::Duration;

use mooncake_relay::{Config, DType, Tensor};
use serde_json::json;

use crate::{
    common::bytes::Canary,
    on::{On, cases},
};

cases! {
    Any: n2_nothing_is_a_transfer_like_any_other, n2_a_tensor_without_dimensions_is_one_element;
    Processes: n2_nothing_goes_from_process_to_process;
}

const PATIENCE: Duration = Duration::from_secs(60);

fn small() -> Config {
    Config::default().with_slot_size(4096)
}

fn n2_nothing_is_a_transfer_like_any_other(on: &On) {
    let (a, b) = on.pair(&small());
    let shapes = [
        Tensor::bytes(0),
        Tensor::new(DType::Float32, [0, 128]),
        Tensor::new(DType::Bfloat16, [128, 0, 7]),
        Tensor::new(DType::Other("torch.qint8".into()), []),
    ];
    for (n, tensor) in (1..).zip(shapes) {
        let (metadata, token) = a.put_bytes(b"", tensor.clone()).unwrap();
        assert_eq!((metadata.size(), metadata.tensor()), (0, &tensor));
        let got = b.get(&metadata.to_string().parse().unwrap()).unwrap().wait().unwrap();
        assert!(got.is_empty());
        assert!(token.wait().unwrap().is_empty());

        let (metadata, token) = a.put_bytes(b"", tensor).unwrap();
        let mut canary = Canary::new(16);
        assert_eq!(b.get_into(&metadata, canary.dest(), PATIENCE).unwrap(), 0);
        canary.is_untouched();
        drop(token.wait().unwrap());
        assert_eq!(a.health().counters.relay.notes_taken, 2 * n, "one ends each");
    }
}

fn n2_a_tensor_without_dimensions_is_one_element(on: &On) {
    let (a, b) = on.pair(&small());
    let tensor = Tensor::new(DType::Float64, []);
    let (metadata, token) = a.put_bytes(&1.5_f64.to_le_bytes(), tensor.clone()).unwrap();
    assert_eq!((metadata.size(), metadata.tensor()), (8, &tensor));
    let mut canary = Canary::new(8);
    assert_eq!(b.get_into(&metadata, canary.dest(), PATIENCE).unwrap(), 8);
    canary.holds(&1.5_f64.to_le_bytes());
    drop(token.wait().unwrap());
}

fn n2_nothing_goes_from_process_to_process(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    for dest in [None, Some(0), Some(16)] {
        let bytes = json!({"size": 0, "fill": 0});
        let put = json!({
            "cmd": "put", "bytes": bytes, "dtype": "torch.float32", "shape": [0, 128],
        });
        let sent = a.sent(a.send(put));
        let mut get = json!({"cmd": "get", "metadata": sent.metadata});
        if let Some(len) = dest {
            get["dest_size"] = json!(len);
        }
        let got = b.ask(get);
        assert_eq!((&got["size"], &got["shape"]), (&json!(0), &json!([0, 128])), "{got}");
        assert_eq!(got["sha256"], *sent.sha256);
        let ended = a.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    }
}
